"""A draft head as some trainer or exporter wrote it: config.json and tensors, read without knowing who that was.

engine layout       config.json is that of a one-block Llama: what vLLM, SGLang and TensorRT-LLM load
speculators layout  config.json has `speculators_model_type`; the block's shape stands in `transformer_layer_config`
"""

import json
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.errors import UserError

EAGLE3_NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM")
EAGLE1_NAMES = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
BLOCK_TYPES = ("llama", "qwen3")  # kinds of block that the `speculators` library trains; qwen3 norms queries and keys
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class HeadFolder:
    """What a folder holds. `tensors` stand under their names in the file."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.config

    @property
    def layer(self) -> dict[str, Any]:
        """The fields that describe the block, as written."""
        return self.config.get("transformer_layer_config") or {} if self.is_speculators else self.config

    @property
    def version(self) -> int | None:
        """3 or 1 by the name of the architecture, else by the tensors; None for what is no EAGLE head."""
        if self.is_speculators:
            return 3 if self.config["speculators_model_type"] == "eagle3" else None
        names = self.config.get("architectures") or []
        for version, known in ((3, EAGLE3_NAMES), (1, EAGLE1_NAMES)):
            if any(name in known for name in names):
                return version
        fc = self.tensors.get("fc.weight", self.tensors.get("model.fc.weight"))
        if fc is None or fc.dim() != 2:
            return None
        return 1 if fc.shape[1] == 2 * fc.shape[0] else 3

    @cached_property
    def layer_config(self) -> PreTrainedConfig:
        """The block's config with the defaults of its type filled in. Raises UserError where it cannot be read."""
        layer = deepcopy(self.layer)  # transformers writes into nested dicts
        block_type = layer.pop("model_type", "llama")
        if block_type not in BLOCK_TYPES:
            raise UserError(
                f"folder={self.path}: config.json has model_type={block_type}; blocks of heads are "
                f"{' or '.join(BLOCK_TYPES)}"
            )
        try:
            config = AutoConfig.for_model(block_type, **layer)
        except Exception as error:  # transformers raises many kinds
            told = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"folder={self.path}: config.json cannot be read ({told}); write it again") from None
        for base in (self.layer.get("rope_theta"), config.rope_parameters["rope_theta"]):
            if base is not None and not (isinstance(base, int | float) and base > 0):
                raise UserError(f"folder={self.path}: config.json has rope_theta={base}: it must be a number above 0")
        rope_type = config.rope_parameters.get("rope_type", "default")
        if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
            raise UserError(f"folder={self.path}: config.json has rope_type={rope_type}, which transformers has not")
        return config

    def flag(self, name: str) -> Any:
        """A field at the top of config.json or in its `eagle_config`, where some put them. None: not written."""
        return self.config.get(name, (self.config.get("eagle_config") or {}).get(name))

    @property
    def draft_vocab_size(self) -> int:
        return self.config.get("draft_vocab_size") or self.layer_config.vocab_size

    @property
    def tap_inputs(self) -> list[int] | None:
        """The list at the top of config.json: vLLM and `speculators` read the states entering these blocks."""
        return self.config.get(TAPS_KEY) or None

    @property
    def tap_outputs(self) -> list[int] | None:
        """The list in `eagle_config`: SGLang reads the states leaving these blocks. An empty list means the default."""
        return (self.config.get("eagle_config") or {}).get(TAPS_KEY) or None


def read_head_folder(folder: str | Path) -> HeadFolder:
    """config.json and all tensors: of safetensors files, or of a pytorch_model.bin. Raises UserError in one line."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"folder={folder}: no such folder; a head of the hub comes by `hf download NAME --local-dir FOLDER`"
        )
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("it holds no mapping")
    except (OSError, ValueError) as error:
        raise UserError(f"folder={folder}: its config.json cannot be read ({error}); write it again") from None
    if problem := _kind_problem(config):
        raise UserError(f"folder={folder}: config.json has {problem}")
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise UserError(f"folder={folder}: no weights there (*.safetensors or pytorch_model.bin); write them again")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, SafetensorError, UnpicklingError, RuntimeError, ValueError, TypeError, EOFError) as error:
            told = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise UserError(f"folder={folder}: {file.name} cannot be read ({told}); write it again") from None
    return HeadFolder(folder, config, tensors)


def _kind_problem(config: dict[str, Any]) -> str | None:
    """The first field that is read here and is of another kind than engines take; null is as good as left out."""
    for key in ("eagle_config", "transformer_layer_config", "rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, dict):
            return f"{key}={config[key]}: it must be a mapping"
    for key, of, what in (("architectures", str, "names"), (TAPS_KEY, int, "blocks' numbers")):
        for value in (config.get(key), (config.get("eagle_config") or {}).get(key)):
            if not (value is None or (isinstance(value, list) and all(type(item) is of for item in value))):
                return f"{key}={value}: it must be a list of {what}"
    return None


def plain_name(name: str, version: int) -> str:
    """A tensor's name without the `model.` prefix; EAGLE-3's block is `midlayer`, whatever the file calls it."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if version == 3 and name.startswith("layers.0.") else name


def vocabulary_problem(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> str | None:  # (Vd,) and (V,)
    """What is wrong with a draft vocabulary, in one line; None where draft id i stands for target id i + d2t[i].

    An absolute table (d2t[i] is the target id itself) is told by t2d; without it by having no value twice: offsets of
    a vocabulary of which two neighbouring ids are part have one.
    """
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        return f"d2t is {dtype_name(d2t)}: engines add it to ids; write int64 offsets"
    size = len(d2t)
    ids = torch.arange(size) + d2t.long()  # (Vd,)
    wanted = None if t2d is None else t2d.bool().nonzero()[:, 0]

    def fits(table: Tensor) -> bool:
        ordered = table.sort().values
        in_range = bool(ordered[0] >= 0) and bool(ordered[-1] < vocab_size) and bool((ordered.diff() > 0).all())
        return in_range and (wanted is None or torch.equal(ordered, wanted))

    never_twice = size >= 8 and len(d2t.unique()) == size
    if fits(d2t.long()) and (not fits(ids) or (wanted is None and never_twice)):
        return (
            f"d2t is absolute (it begins {d2t[:3].tolist()}): engines take draft id + d2t for the target's id; write "
            f"offsets, d2t[i] - i"
        )
    if fits(ids):
        if wanted is None and size < vocab_size and not bool(d2t.any()):
            return f"d2t is all zeros and no t2d confirms it: engines draft the target's ids 0 to {size - 1} only"
        return None
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        return f"d2t leads out of the target's {vocab_size} ids: draft id + d2t is {int(ids.min())} to {int(ids.max())}"
    if len(ids.unique()) < size:
        return f"d2t gives {size - len(ids.unique())} target ids twice; every draft id needs one of its own"
    return (
        f"d2t and t2d disagree: d2t leads to {size} ids, t2d marks {len(wanted)}, and {int(t2d[ids].sum())} are the "
        f"same; write t2d true exactly at the ids i + d2t[i]"
    )


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
