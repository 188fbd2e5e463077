"""Does an exported folder hold the draft that was trained? Read it again in a process of its own and compare logits.

The reader knows the folder alone: config.json field by field as engines do (RoPE from the fields of before transformers
5), every tensor by name, strictly both ways. It shares no code with the writer but the modules that compute.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.eagle import VARIANTS, EagleConfig, EagleHead
from models.medusa import MedusaConfig, MedusaHeads

LENGTH = 12  # tokens of the probe
EAGLE1_NAMES = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle")


def largest_difference(draft: EagleHead | MedusaHeads | PreTrainedModel, folder: str | Path) -> float:
    """Largest difference of a logit between `draft`, here, and the folder, loaded by another process; both in fp32.

    Relative to the largest logit where that is above 1. For EAGLE-1, whose logits are the target's own, of its outputs.
    """
    draft.float().eval()
    probe = make_probe(draft)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "probe.safetensors"
        save_file({**probe, "logits": probe_logits(draft, probe)}, path)
        command = [sys.executable, "-m", "models.reload", str(Path(folder).resolve()), str(path)]
        root = Path(__file__).resolve().parents[1]
        result = subprocess.run(
            command, cwd=root, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
        )
    if result.returncode:
        raise RuntimeError(f"reading {folder} again failed:\n{result.stderr}")
    return float(result.stdout.splitlines()[-1])


def make_probe(draft: EagleHead | MedusaHeads | PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
    """Seeded inputs of the shapes that the draft reads."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(draft, MedusaHeads):
        return {"features": torch.randn(LENGTH, draft.config.hidden_size, generator=generator)}
    if not isinstance(draft, EagleHead):
        vocab_size = draft.config.get_text_config().vocab_size
        return {"input_ids": torch.randint(vocab_size, (1, LENGTH), generator=generator)}
    c = draft.config
    shape = (1, LENGTH, len(c.tap_ids), c.hidden_size) if c.version == 3 else (1, LENGTH, c.hidden_size)
    return {
        "input_ids": torch.randint(c.vocab_size, (1, LENGTH), generator=generator),
        "features": torch.randn(shape, generator=generator),
    }


@torch.no_grad()
def probe_logits(draft: EagleHead | MedusaHeads | PreTrainedModel, probe: dict[str, Tensor]) -> Tensor:
    """What the draft says of the probe; a head also of its own output, fed back one position later."""
    if isinstance(draft, MedusaHeads):
        return draft.logits(draft(probe["features"]))  # (K, T, V)
    if not isinstance(draft, EagleHead):
        return draft(input_ids=probe["input_ids"], use_cache=False).logits
    ids, positions = probe["input_ids"], torch.arange(LENGTH)[None]
    first = draft(ids, draft.project(probe["features"]), positions)  # (1, T, D)
    second = draft(ids.roll(-1, dims=1), first, positions + 1)
    outputs = torch.cat((first, second))  # (2, T, D)
    return draft.logits(outputs) if draft.config.version == 3 else outputs


def read_folder(folder: str | Path) -> EagleHead | MedusaHeads | PreTrainedModel:
    """The exported draft in fp32. Raises ValueError where the folder is not exactly what its config says."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    if "speculators_model_type" in config or config["architectures"][0] in (*EAGLE1_NAMES, "LlamaForCausalLMEagle3"):
        return read_head(folder, config)
    if config["architectures"] == ["MedusaModel"]:
        return read_medusa(folder, config)
    draft, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if wrong := [name for names in info.values() for name in names]:
        raise ValueError(f"{folder}: tensors that the config does not have, or lacks: {wrong}")
    return draft.eval()


def read_head(folder: Path, config: dict[str, Any]) -> EagleHead:
    layer = config.get("transformer_layer_config", config)
    version = 1 if config["architectures"][0] in EAGLE1_NAMES else 3
    state = load_file(folder / "model.safetensors")
    if version == 3:
        state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}
    if (bias := state.pop("fc.bias", None)) is not None and bool((bias != 0).any()):
        raise ValueError(f"{folder}: fc.bias is not zero")
    shape = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "max_position_embeddings", "rms_norm_eps",
    )  # fmt: skip
    head = EagleHead(
        EagleConfig(
            version=version,
            **{name: layer[name] for name in shape},
            draft_vocab_size=config.get("draft_vocab_size", layer["vocab_size"]),
            rope_parameters={
                "rope_type": "default",
                **layer.get("rope_scaling", {}),
                "rope_theta": layer["rope_theta"],
            },
            tap_ids=tuple(range(state["fc.weight"].shape[1] // layer["hidden_size"])) if version == 3 else (),
            **{variant: bool(config.get(variant)) for variant in VARIANTS},
        )
    )
    derived = {"tap_scale", *({"d2t", "t2d"} if head.config.draft_vocab_size == head.config.vocab_size else ())}
    missing, unexpected = head.load_state_dict(state, strict=False)
    if version == 3:
        missing = sorted(set(missing) - derived)
    if missing or unexpected:
        raise ValueError(f"{folder}: missing {missing}, unexpected {unexpected}")
    return head.float().eval()


def read_medusa(folder: Path, config: dict[str, Any]) -> MedusaHeads:
    """As vLLM 0.32: every head as wide as `vocab_size`, no token_map."""
    heads = MedusaHeads(
        MedusaConfig(
            num_heads=config["num_heads"],
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            truncated_vocab_size=config["vocab_size"],
            num_hidden_layers=config["num_hidden_layers"],
            medusa_fc_bias=config.get("medusa_fc_bias", False),
        )
    )
    state = load_file(folder / "model.safetensors")
    wrong = sorted(state.keys() ^ (heads.state_dict().keys() - {"token_map"}))
    if wrong or config.get("truncated_vocab_size", config["vocab_size"]) != config["vocab_size"]:
        raise ValueError(f"{folder}: missing or unexpected {wrong}, or a truncated vocabulary")
    heads.load_state_dict({**state, "token_map": heads.token_map})
    return heads.float().eval()


def main(folder: str, probe: str) -> None:
    tensors = load_file(probe)
    expected = tensors.pop("logits")
    logits = probe_logits(read_folder(folder), tensors)
    print(float((logits - expected).abs().max() / expected.abs().max().clamp(min=1)))


if __name__ == "__main__":
    main(*sys.argv[1:])
