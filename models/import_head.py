"""A published EAGLE head as ours, so that it can be measured: the folders of models/head_folder.py become an EagleHead.

The function stays the same; what an EagleHead has no room for (biases, several blocks, another activation, a width of
its own) is refused in one line. Missing embeddings are the target's, as engines take them.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from models.eagle import EagleConfig, EagleHead, check_widths
from models.errors import UserError
from models.head_folder import TAPS_KEY, HeadFolder, plain_name, read_head_folder, vocabulary_problem
from models.target import Target, check_tap_ids

FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


def read_head(folder: str | Path, target: Target, *, tap_ids: Sequence[int] | None = None) -> EagleHead:
    """The head in `folder`, on the CPU, in eval mode and in the dtype of its weights.

    tap_ids: the blocks whose inputs it reads; None: as config.json says, else the default of `target`.
    Raises UserError where the folder cannot be read, does not fit `target`, or needs what an EagleHead has not.
    """
    found = read_head_folder(folder)
    if found.version is None:
        kind = found.config.get("speculators_model_type") or found.config.get("architectures")
        raise UserError(
            f"folder={folder}: {kind} is no EAGLE head that this tool knows; give an EAGLE-1 or EAGLE-3 head"
        )
    config = head_config(found, target, tap_ids)
    check_widths(config, target, str(folder))
    tensors = head_tensors(found, config, target)
    if config.version == 3:
        config = replace(config, draft_vocab_size=len(tensors["d2t"]))
    head = EagleHead(config, target_head=target.logits)
    if config.version == 3:
        tensors["tap_scale"] = head.tap_scale
    own = head.state_dict()
    if missing := sorted(own.keys() - tensors.keys()):
        raise UserError(
            f"folder={folder}: {missing[0]} is missing; get the whole head, or train.check_export names more"
        )
    if unknown := sorted(tensors.keys() - own.keys()):
        raise UserError(f"folder={folder}: {unknown[0]} is a tensor that an EAGLE-{config.version} head here has not")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise UserError(
                f"folder={folder}: {name} has shape {list(tensor.shape)}, config.json says {list(own[name].shape)}; "
                f"correct config.json"
            )
        if not bool(tensor.isfinite().all()):
            raise UserError(f"folder={folder}: {name} has values that are not finite; get the head again")
    head.load_state_dict(tensors, strict=True)
    floats = {tensor.dtype for name, tensor in found.tensors.items() if tensor.is_floating_point()}
    if len(floats) == 1 and "embed_tokens.weight" in {plain_name(name, config.version) for name in found.tensors}:
        for parameter in head.parameters():  # not head.to(dtype): rotary frequencies stay fp32
            parameter.data = parameter.data.to(*floats)
    return head.eval()


def head_config(found: HeadFolder, target: Target, tap_ids: Sequence[int] | None) -> EagleConfig:
    """The folder's config.json as an EagleConfig. Raises UserError for what an EagleHead cannot be."""
    c, version = found.layer_config, found.version
    size = found.config.get("target_hidden_size") or c.hidden_size
    for is_foreign, what in (
        (c.num_hidden_layers != 1, f"num_hidden_layers={c.num_hidden_layers}: heads here have 1 block"),
        (c.hidden_act != "silu", f"hidden_act={c.hidden_act}: heads here use silu"),
        (
            size != c.hidden_size,
            f"target_hidden_size={size}: heads here are as wide as the target, this is {c.hidden_size}",
        ),
        (found.flag("use_aux_hidden_state") is False, "use_aux_hidden_state=false: EAGLE-3 heads here read taps"),
    ):
        if is_foreign:
            raise UserError(f"folder={found.path}: {what}; this head cannot be measured here")
    flags = {name: bool(found.flag(name)) for name in FLAGS} if version == 3 else {}
    if version == 3:
        flags |= {"norm_before_residual": norm_before_residual(found), "qk_norm": c.model_type == "qwen3"}
    elif c.model_type != "llama":
        raise UserError(f"folder={found.path}: model_type={c.model_type}: EAGLE-1 heads here have a Llama block")
    return EagleConfig(
        version=version,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        vocab_size=c.vocab_size,
        draft_vocab_size=found.draft_vocab_size if version == 3 else c.vocab_size,
        max_position_embeddings=num_positions(found),
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=dict(c.rope_parameters),
        tap_ids=read_tap_ids(found, target, tap_ids) if version == 3 else (),
        **flags,
    )


def num_positions(found: HeadFolder) -> int:
    """A head with a sliding window computes what one without does as long as the text fits into the window."""
    c = found.layer_config
    is_sliding = "sliding_attention" in (getattr(c, "layer_types", None) or ())
    window = getattr(c, "sliding_window", None)
    return min(c.max_position_embeddings, window) if is_sliding and window else c.max_position_embeddings


def norm_before_residual(found: HeadFolder) -> bool:
    """Left out of a `speculators` folder it means true to vLLM and false to the library: only its maker knows."""
    value = found.flag("norm_before_residual")
    if value is None and found.is_speculators:
        raise UserError(
            f"folder={found.path}: config.json has no norm_before_residual, which vLLM takes for true and the "
            f"speculators library for false; write true or false there"
        )
    return bool(value)


def read_tap_ids(found: HeadFolder, target: Target, tap_ids: Sequence[int] | None) -> tuple[int, ...]:
    """The blocks of the target whose inputs the head reads: as the caller says, as written, or the default."""
    at_top = found.tap_inputs
    inside = None if found.is_speculators or found.tap_outputs is None else [i + 1 for i in found.tap_outputs]
    if tap_ids is None and inside is not None and inside != at_top:
        raise UserError(
            f"folder={found.path}: {TAPS_KEY} is {at_top or 'not written'} at the top (inputs of blocks) and "
            f"{found.tap_outputs} in eagle_config (outputs, so inputs {inside}); say which by target.tap_ids=[...]"
        )
    if tap_ids is None and at_top and max(at_top) >= target.num_blocks:
        raise UserError(
            f"folder={found.path}: it reads the inputs of blocks {at_top}, {target.name} has blocks from 0 to "
            f"{target.num_blocks - 1}; give the target that it was trained for, target=hf target.source=..."
        )
    return check_tap_ids(tap_ids or at_top or "default", target.num_blocks)


def head_tensors(found: HeadFolder, config: EagleConfig, target: Target) -> dict[str, Tensor]:
    """The tensors under our names. Biases of zeros are dropped, what engines take from the target is filled in."""
    tensors = {plain_name(name, config.version): tensor for name, tensor in found.tensors.items()}
    for name in [name for name in tensors if name.endswith(".bias")]:
        if bool(tensors.pop(name).any()):
            raise UserError(
                f"folder={found.path}: {name} is a bias, and heads here have none; it cannot be measured here"
            )
    tensors.setdefault("embed_tokens.weight", target.embedding.detach().cpu())
    if config.version == 1:
        tensors.pop("lm_head.weight", None)  # the target's own drafts
        return tensors
    size, width = config.vocab_size, config.draft_vocab_size
    if width == size:
        tensors.setdefault("lm_head.weight", target.model.get_output_embeddings().weight.detach().cpu())
        tensors.setdefault("d2t", torch.zeros(width, dtype=torch.int64))
    for name, rows in (("d2t", width), ("lm_head.weight", width), ("t2d", size)):
        if name in tensors and len(tensors[name]) != rows:
            raise UserError(
                f"folder={found.path}: {name} has {len(tensors[name])} rows, config.json says {rows}; correct it there"
            )
        if name not in tensors and name != "t2d":
            raise UserError(
                f"folder={found.path}: {name} is missing, and the draft vocabulary has {width} of the target's {size} "
                f"ids; get the whole head"
            )
    if problem := vocabulary_problem(tensors["d2t"], tensors.get("t2d"), size):
        raise UserError(f"folder={found.path}: {problem}")
    ids = torch.arange(width) + tensors["d2t"].long()  # (Vd,)
    order = ids.argsort()  # ours ascend; some trainers order them by frequency
    order = order[ids[order] < target.vocab_size]  # ids beyond are padding, which stands for no token
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = ids[order] - torch.arange(len(order))
    tensors["t2d"] = torch.zeros(size, dtype=torch.bool)
    tensors["t2d"][ids[order]] = True
    return tensors
