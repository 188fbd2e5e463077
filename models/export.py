"""A trained draft as the folder that an engine loads: names, shapes and config as each engine reads them.

EAGLE-3      one folder for vLLM, SGLang and TensorRT-LLM: `midlayer.*`, d2t as offsets, own lm_head, the target's
             embedding
EAGLE-1      `layers.0.*`, no norm, no lm_head; vLLM and SGLang know it by different names, and SGLang's fc has a bias
speculators  EAGLE-3 as `layers.0.*` under the config of the `speculators` library (0.9.0), which names the target
Medusa       for vLLM: `blocks.*` and `lm_heads.*` as wide as the target, as many heads as tokens a round
draft model  an ordinary transformers folder, its head as wide as the target's

1. `export` writes weights, config and tokenizer
2. models/check_export.py reads the folder as an engine does and names what is wrong
3. models/reload.py loads it again in a process of its own and compares logits
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.eagle import VARIANTS, EagleConfig, EagleHead
from models.errors import UserError
from models.medusa import MedusaHeads
from models.servable import ENGINES, unreadable_taps
from models.target import Target

SPECULATORS_VERSION = "0.9.0"
# Variants of EAGLE-3 (models/eagle.py) that a folder may ask for; SGLang and TensorRT-LLM compute none of them.
KNOWN_VARIANTS = {
    "vllm": ("norm_before_residual",),
    "sglang": (),
    "trtllm": (),
    "speculators": ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
}
PADDING_MARGIN = 20.0  # nats between the mean logit and a padded one, so its probability is below exp(-20) / V


def export(
    draft: EagleHead | MedusaHeads | PreTrainedModel,
    target: Target,
    folder: str | Path,
    *,
    to: str,
    draft_len: int = 3,
    target_path: str = "",
) -> None:
    """Write `draft` to `folder` as the engine `to` loads it: model.safetensors, config.json, tokenizer files.

    Weights keep the draft's dtype; a draft model and Medusa heads are fitted to the target's width in place.
    draft_len: tokens a round, where the format says it. target_path: what the engine loads as the target, where the
    format names it. Raises UserError where the engine cannot read such a draft.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(draft, EagleHead):
        check_head(draft.config, to)
        tensors = head_tensors(draft, to)
        config = head_config(draft.config, target, to, draft.dtype, draft_len=draft_len, target_path=target_path)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", config)
    elif isinstance(draft, MedusaHeads):
        fit_medusa(draft, draft_len)
        refuse_non_finite(draft.tensors())
        draft.save_pretrained(folder)
    else:
        fit_width(draft, width=target.config.vocab_size, num_ids=target.vocab_size)
        refuse_non_finite(dict(draft.named_parameters()))
        set_assistant_defaults(draft, draft_len)
        draft.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", {**config, "torch_dtype": dtype_name(draft.dtype)})  # before transformers 5
    target.tokenizer.save_pretrained(folder)


# --- EAGLE heads -------------------------------------------------------------------------------------------------


def check_head(config: EagleConfig, to: str) -> None:
    """Raises UserError where the engine's code has no room for this head."""
    name = ENGINES[to]
    if config.version == 3 and (reason := unreadable_taps(config.tap_ids, to)):
        raise UserError(f"to={to}: {reason}")
    for variant in VARIANTS:
        if getattr(config, variant) and variant not in KNOWN_VARIANTS[to]:
            known = [engine for engine, variants in KNOWN_VARIANTS.items() if variant in variants]
            fix = f"use to={' or to='.join(known)}" if known else "no export has it"
            raise UserError(f"to={to}: {name} is not known to read {variant}, which this head uses; {fix}")


def head_tensors(head: EagleHead, to: str) -> dict[str, Tensor]:
    """The head's tensors under the engine's names. vLLM needs the embedding where it splits layers over devices."""
    state = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    if (scale := state.pop("tap_scale", None)) is not None:
        state["fc.weight"] = state["fc.weight"].float() * scale.float()
    if head.config.draft_vocab_size == head.config.vocab_size:  # nothing to translate: TensorRT-LLM has no d2t then
        state.pop("d2t", None)
        state.pop("t2d", None)
    if to == "speculators":
        state = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
    if to == "sglang" and head.config.version == 1:
        state["fc.bias"] = torch.zeros(head.config.hidden_size)
    state = {name: x.to(head.dtype).contiguous() if x.is_floating_point() else x for name, x in state.items()}
    refuse_non_finite(state)
    return state


def head_config(
    config: EagleConfig,
    target: Target,
    to: str,
    dtype: torch.dtype,
    *,
    draft_len: int = 3,
    target_path: str = "",
) -> dict[str, Any]:
    """config.json of an exported head."""
    layer = llama_config(
        config, dtype, num_positions=max(config.max_position_embeddings, min(target.max_positions, 1 << 20))
    )
    if config.version == 1:
        return {"architectures": ["LlamaForCausalLMEagle" if to == "sglang" else "EagleLlamaForCausalLM"], **layer}
    layout = "speculators" if to == "speculators" else "vllm"  # SGLang and TensorRT-LLM load vLLM's folder
    own = {
        "draft_vocab_size": config.draft_vocab_size,
        **{variant: getattr(config, variant) for variant in KNOWN_VARIANTS[layout]},
    }
    if to != "speculators":
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            **own,
            **tap_fields(config.tap_ids, target.num_blocks),
        }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_len}],
            "verifier": {"name_or_path": target_path, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": layer,
        **own,
        "eagle_aux_hidden_state_layer_ids": list(config.tap_ids),  # inputs of these blocks, as ours
        "target_hidden_size": None,  # the head's own
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype_name(dtype),
    }


def llama_config(config: EagleConfig, dtype: torch.dtype, *, num_positions: int) -> dict[str, Any]:
    """The one block of a head as fields of a LlamaConfig, every one written: engines' defaults differ."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": num_positions,
        "rms_norm_eps": config.rms_norm_eps,
        **rope_fields(config.rope_parameters),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(dtype),
    }


def rope_fields(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """RoPE in both layouts: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before)."""
    scaling = {key: value for key, value in rope_parameters.items() if key != "rope_theta"}
    fields = {"rope_theta": rope_parameters["rope_theta"], "rope_parameters": dict(rope_parameters)}
    return fields if scaling.get("rope_type", "default") == "default" else {**fields, "rope_scaling": scaling}


def tap_fields(tap_ids: tuple[int, ...], num_blocks: int) -> dict[str, Any]:
    """Which states of the target the head reads; nothing for the default ones, so that no engine can misread the ids.

    vLLM reads the list at the top as *inputs* of blocks; SGLang the one inside `eagle_config`, as their outputs.
    """
    outputs = captured_outputs(tap_ids, num_blocks)
    if outputs is None:
        return {}
    return {
        "eagle_aux_hidden_state_layer_ids": list(tap_ids),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs},
    }


def captured_outputs(tap_ids: tuple[int, ...] | None, num_blocks: int) -> list[int] | None:
    """The taps as blocks whose *output* is captured: the input of block i is the output of i - 1.

    None for 2, L//2, L-3 and without taps: what every engine captures by itself.
    """
    if not tap_ids or tuple(tap_ids) == (2, num_blocks // 2, num_blocks - 3):
        return None
    return [tap_id - 1 for tap_id in tap_ids]


# --- Medusa heads ------------------------------------------------------------------------------------------------


def fit_medusa(heads: MedusaHeads, draft_len: int) -> None:
    """In place: `draft_len` heads, over all of the target's ids.

    vLLM drafts a token with every head of the folder, whatever num_speculative_tokens says, and its loader takes a
    truncated vocabulary only where all heads share one matrix.
    """
    if draft_len > heads.config.num_heads:
        raise UserError(
            f"export.draft_len={draft_len}: the draft has {heads.config.num_heads} Medusa heads, and each drafts one "
            f"token; set it to {heads.config.num_heads} or less"
        )
    heads.keep_heads(draft_len)
    heads.widen()


# --- draft models ------------------------------------------------------------------------------------------------


@torch.no_grad()
def fit_width(draft: PreTrainedModel, *, width: int, num_ids: int) -> None:
    """Give head and embedding `width` rows, the target's; those from `num_ids` on stand for no token.

    Engines compare the widths of the two vocabularies, and targets are often padded. A padded row of zeros would win
    wherever the real logits are negative, so it is the mean of the real rows, whose logit is never the largest. A final
    LayerNorm y = g n + b (n has mean 0) also allows a constant shift: the row 1/g gives sum(n) + sum(b/g) = sum(b/g)
    whatever the state, so that many of them lower the padded logits by PADDING_MARGIN.
    """
    num_rows = draft.get_output_embeddings().weight.shape[0]
    if num_rows < num_ids:
        raise UserError(
            f"the draft's head has {num_rows} ids and the target {num_ids}; a draft needs the target's tokenizer"
        )
    if num_rows != width:
        draft.resize_token_embeddings(width, mean_resizing=False)
    draft.config.get_text_config().vocab_size = width
    if width == num_ids:
        return
    head, embedding = draft.get_output_embeddings(), draft.get_input_embeddings()
    if embedding.weight is not head.weight:
        embedding.weight[num_ids:] = 0.0  # never read
    head.weight[num_ids:] = padding_row(head.weight[:num_ids].float(), getattr(draft.base_model, "ln_f", None))
    if head.bias is not None:
        head.bias[num_ids:] = head.bias[:num_ids].mean() - PADDING_MARGIN


def padding_row(rows: Tensor, final_norm: nn.Module | None) -> Tensor:  # (V, D) -> (D,)
    """See `fit_width`. Without a usable LayerNorm: the mean row alone, so that no padded id is ever the best one."""
    mean = rows.mean(0)
    if not isinstance(final_norm, nn.LayerNorm) or final_norm.bias is None or bool((final_norm.weight == 0).any()):
        return mean
    inverse = 1 / final_norm.weight.float()
    per_unit = (final_norm.bias.float() * inverse).sum()
    # 30M drafts had factors of 16 to 76; at 76 the rounding of bf16 left 8 of the 20 nats, 19 below the best logit
    factor = -PADDING_MARGIN / per_unit
    return mean + factor * inverse if bool(factor.abs() <= 100) else mean


def set_assistant_defaults(draft: PreTrainedModel, draft_len: int) -> None:
    """transformers reads these of an `assistant_model`: draft_len tokens every round, its own heuristics off."""
    draft.generation_config.num_assistant_tokens = draft_len
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0


# --- both --------------------------------------------------------------------------------------------------------


def refuse_non_finite(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError(
                f"the draft's {name} has values that are not finite in {dtype_name(tensor.dtype)}; train it again, "
                f"or export it with export.dtype=fp32"
            )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
