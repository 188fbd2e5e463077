"""What an engine would get wrong about an EAGLE folder without a word, found by reading the folder as the engine does.

Takes any folder, also one made elsewhere: EAGLE-3 and EAGLE-1 as vLLM, SGLang and TensorRT-LLM load them, and EAGLE-3
of the `speculators` library. Names, shapes, values, vocabulary, config, RoPE, taps, embedding: a line a problem.
The rules are those of the engines' loaders: vLLM 0.32, SGLang 0.5.23, speculators 0.9.0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.errors import UserError
from models.head_folder import (
    EAGLE3_NAMES,
    TAPS_KEY,
    HeadFolder,
    dtype_name,
    plain_name,
    read_head_folder,
    vocabulary_problem,
)

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "speculators": "speculators"}
# Fields whose defaults differ between engines and versions of transformers: written, they are read alike by all.
WRITTEN = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
ONLY_VLLM = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LEFT_AT_RANDOM = "engines leave what they have there, at random, without a word"
Shape = tuple[int, ...]


def check_folder(
    folder: str | Path,
    *,
    to: str | None = None,
    target_embedding: Tensor | None = None,  # (V, D)
    target_config: Any = None,
    tap_ids: Sequence[int] | None = None,
) -> list[str]:
    """One line for each thing that an engine would get wrong; empty where the folder is good.

    to: the engine that shall load it (a key of ENGINES); None: all that read its layout, so a portable folder.
    target_embedding: the target's, to tell a random embedding from its own. target_config: transformers' config of the
    target, for widths, positions and the number of blocks. tap_ids: the blocks whose inputs the head was trained on.
    """
    if to is not None and to not in ENGINES:
        raise UserError(f"to={to}: no engine that loads heads; use {', '.join(ENGINES)}")
    try:
        head = read_head_folder(folder)
        if head.version is None:
            return [_no_head(head)]
        engines = {to} if to else {"vllm", "speculators"} if head.is_speculators else {"vllm", "sglang", "trtllm"}
        if problem := _layout_problem(head, to):
            return [problem]
        shapes = tensor_shapes(head, engines)
    except UserError as error:
        return [str(error)]
    tensors = {plain_name(name, head.version): tensor for name, tensor in head.tensors.items()}
    target = None if target_config is None else getattr(target_config, "get_text_config", lambda: target_config)()
    problems = [
        *_check_names(head, tensors, shapes, engines),
        *_check_shapes(tensors, shapes),
        *_check_values(tensors),
        *_check_config(head, engines),
        *_check_rope(head),
    ]
    if head.version == 3:
        problems += _check_vocabulary(head, tensors, engines)
        problems += _check_taps(head, engines, target, tap_ids)
    problems += _check_embedding(head, tensors, engines, target_embedding)
    if target is not None:
        problems += _check_target(head, target)
    return problems


def tensor_shapes(head: HeadFolder, engines: set[str]) -> dict[str, Shape]:
    """The tensors that the folder must hold, under their plain names. Raises UserError where config.json is broken."""
    c = head.layer_config
    size, head_dim = c.hidden_size, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    block = "midlayer." if head.version == 3 else "layers.0."
    width = 2 * size if head.version == 3 else size
    shapes: dict[str, Shape] = {
        block + "self_attn.q_proj.weight": (c.num_attention_heads * head_dim, width),
        block + "self_attn.k_proj.weight": (c.num_key_value_heads * head_dim, width),
        block + "self_attn.v_proj.weight": (c.num_key_value_heads * head_dim, width),
        block + "self_attn.o_proj.weight": (size, c.num_attention_heads * head_dim),
        block + "mlp.gate_proj.weight": (c.intermediate_size, size),
        block + "mlp.up_proj.weight": (c.intermediate_size, size),
        block + "mlp.down_proj.weight": (size, c.intermediate_size),
        block + "post_attention_layernorm.weight": (size,),
    }
    if c.attention_bias:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{block}self_attn.{name}.bias"] = shapes[f"{block}self_attn.{name}.weight"][:1]
    if c.model_type == "llama" and c.mlp_bias:
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"{block}mlp.{name}.bias"] = shapes[f"{block}mlp.{name}.weight"][:1]
    if head.version == 1:
        shapes["fc.weight"] = (size, 2 * size)
        if engines == {"sglang"} or "LlamaForCausalLMEagle" in (head.config.get("architectures") or []):
            shapes["fc.bias"] = (size,)
        return shapes
    num_taps = len(head.tap_inputs or head.tap_outputs or (0, 0, 0))
    target_size = head.config.get("target_hidden_size") or size
    shapes["fc.weight"] = (size, num_taps * target_size)
    if head.flag("norm_before_fc"):
        shapes["input_norm.weight"] = (num_taps * target_size,)
    if head.flag("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target_size,) for i in range(num_taps)}
    if c.model_type == "qwen3":
        shapes |= {f"{block}self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    for name in (block + "input_layernorm", block + "hidden_norm", "norm"):
        shapes[name + ".weight"] = (size,)
    shapes["lm_head.weight"] = (head.draft_vocab_size, size)
    if head.draft_vocab_size != c.vocab_size:
        shapes["d2t"] = (head.draft_vocab_size,)
    return shapes


def optional_shapes(head: HeadFolder) -> dict[str, Shape]:
    """Tensors that engines know and do without: the target's embedding, and the maps where they say nothing."""
    c = head.layer_config
    shapes: dict[str, Shape] = {"embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    return shapes | ({"d2t": (head.draft_vocab_size,), "t2d": (c.vocab_size,)} if head.version == 3 else {})


# --- each check: a line a problem --------------------------------------------------------------------------------


def _no_head(head: HeadFolder) -> str:
    if head.is_speculators:
        kind = head.config["speculators_model_type"]
        return f"speculators_model_type={kind}: of these folders this checker knows eagle3 alone"
    return (
        f"architectures={head.config.get('architectures')}: no EAGLE head, and no fc.weight in the file; use "
        f"{EAGLE3_NAMES[0]} (EAGLE-3) or EagleLlamaForCausalLM (EAGLE-1)"
    )


def _layout_problem(head: HeadFolder, to: str | None) -> str | None:
    if head.is_speculators and to in ("sglang", "trtllm"):
        return f"speculators_model_type: {ENGINES[to]} reads no speculators folder; export it with to={to}"
    if not head.is_speculators and to == "speculators":
        return "speculators_model_type is missing: the library loads nothing without it; export it with to=speculators"
    return None


def _check_names(
    head: HeadFolder, tensors: dict[str, Tensor], shapes: dict[str, Shape], engines: set[str]
) -> list[str]:
    problems = []
    if prefixed := [name for name in head.tensors if name.startswith("model.")]:
        problems.append(
            f"{len(prefixed)} tensors have a `model.` prefix ({prefixed[0]}, ...): vLLM adds its own and stops; write "
            f"them without"
        )
    if head.version == 3:
        blocks = {name.removeprefix("model.").split(".")[0] for name in head.tensors} & {"midlayer", "layers"}
        if blocks == {"midlayer", "layers"} and len(tensors) < len(head.tensors):
            problems.append(
                "the block is there as midlayer.* and as layers.0.*: which one is loaded is chance; keep one"
            )
        elif "layers" in blocks and engines & {"sglang", "trtllm"}:
            problems.append("the block is named layers.0.*: SGLang knows midlayer.* and skips other names; rename it")
        elif "midlayer" in blocks and head.is_speculators:
            problems.append("the block is named midlayer.*: the speculators library knows layers.0.*; rename it")
    problems += [_missing(name, head, shapes) for name in shapes if name not in tensors]
    known = shapes | optional_shapes(head)
    for name in sorted(tensors.keys() - known.keys()):
        problems.append(_unknown(name, head))
    return problems


def _missing(name: str, head: HeadFolder, shapes: dict[str, Shape]) -> str:
    width = head.draft_vocab_size
    is_cut = width != head.layer_config.vocab_size
    if name == "d2t":
        return (
            f"d2t is missing, and the draft vocabulary has {width} of the target's {head.layer_config.vocab_size} ids: "
            f"engines take draft id i for target id i; write d2t as int64 offsets, target id - draft id"
        )
    if name == "lm_head.weight":
        rows = "whose rows stand for other ids" if is_cut else "not the one that was trained"
        return f"lm_head.weight is missing: SGLang draws one at random and vLLM takes the target's, {rows}; write it"
    if name == "fc.bias":
        return "fc.bias is missing: SGLang's EAGLE-1 has one and leaves it at random; write zeros"
    return f"{name} is missing: {LEFT_AT_RANDOM}; write it ({list(shapes[name])})"


def _unknown(name: str, head: HeadFolder) -> str:
    if name.endswith(".bias"):
        return (
            f"{name} is a bias that config.json does not state: engines drop it without a word; train without, or zero"
        )
    if head.version == 1 and name == "lm_head.weight":
        return "lm_head.weight: EAGLE-1 drafts by the target's head, and vLLM stops at another; leave it out"
    if head.version == 1 and name in ("layers.0.input_layernorm.weight", "norm.weight"):
        return f"{name}: EAGLE-1 has no such norm, engines skip it without a word; leave it out and train without"
    return f"{name} is unknown: SGLang skips it without a word, vLLM stops; leave it out, or name it as engines do"


def _check_shapes(tensors: dict[str, Tensor], shapes: dict[str, Shape]) -> list[str]:
    return [
        f"{name} has shape {list(tensors[name].shape)}, and config.json says {list(shape)}; make them agree"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]


def _check_values(tensors: dict[str, Tensor]) -> list[str]:
    return [
        f"{name} has {int((~tensor.isfinite()).sum())} values that are not finite; write the trained ones"
        for name, tensor in sorted(tensors.items())
        if tensor.is_floating_point() and not bool(tensor.isfinite().all())
    ]


def _check_vocabulary(head: HeadFolder, tensors: dict[str, Tensor], engines: set[str]) -> list[str]:
    vocab_size = head.layer_config.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    problems = []
    if t2d is not None and tuple(t2d.shape) != (vocab_size,):
        return [f"t2d has shape {list(t2d.shape)}, and config.json says a vocabulary of {vocab_size}; make them agree"]
    if t2d is not None and t2d.dtype != torch.bool:
        problems.append(f"t2d is {dtype_name(t2d)}: it must be bool, true at the target ids that can be drafted")
    if d2t is not None and tuple(d2t.shape) == (head.draft_vocab_size,):
        if not d2t.is_floating_point() and d2t.dtype != torch.int64:
            problems.append(f"d2t is {dtype_name(d2t)}: it must be int64")
        if problem := vocabulary_problem(d2t, t2d, vocab_size):
            problems.append(problem)
    if t2d is None and "d2t" in tensors and head.draft_vocab_size < vocab_size and "speculators" in engines:
        problems.append("t2d is missing: the speculators library needs it beside d2t; write bool [V]")
    return problems


def _check_config(head: HeadFolder, engines: set[str]) -> list[str]:
    c, config = head.layer_config, head.config
    problems = []
    if not head.is_speculators:  # that library writes what differs from the defaults of the block's type
        for key in WRITTEN:
            if config.get(key) is None:
                problems.append(f"config.json has no {key}: engines take {getattr(c, key)} for it; write it")
    if head.version == 3 and head.config.get("draft_vocab_size") is None:
        problems.append(
            f"config.json has no draft_vocab_size: vLLM takes the target's {c.vocab_size} for it; write lm_head's rows"
        )
    if head.version == 3 and c.tie_word_embeddings:
        problems.append("tie_word_embeddings=true: SGLang drafts by the embedding and drops lm_head; set it to false")
    if head.version == 3 and config.get("tie_word_embeddings") and head.is_speculators:
        problems.append("tie_word_embeddings=true: a head has an lm_head of its own; set it to false")
    if c.num_hidden_layers != 1:
        problems.append(
            f"num_hidden_layers={c.num_hidden_layers}: engines build that many blocks, a head has 1; set it to 1"
        )
    if not c.rms_norm_eps > 0:
        problems.append(f"rms_norm_eps={c.rms_norm_eps}: norms need one above 0; write the training's")
    if c.hidden_act != "silu":
        problems.append(f"hidden_act={c.hidden_act}: engines' blocks know silu alone; serve a head that was trained so")
    names = config.get("architectures") or []
    if not head.is_speculators and (wanted := _architecture(head.version, engines)) and wanted not in names:
        who = ENGINES["sglang" if "sglang" in engines else "vllm"]
        problems.append(f"architectures={names}: {who} knows such heads as {wanted}; write that")
    if head.version == 3 and engines & {"sglang", "trtllm"}:
        for key in ONLY_VLLM:
            if head.flag(key):
                problems.append(
                    f"{key}=true: SGLang and TensorRT-LLM compute the head without it; serve it by vLLM alone"
                )
        if c.attention_bias:
            problems.append("attention_bias=true: SGLang and TensorRT-LLM drop the biases; serve it by vLLM alone")
        if c.model_type == "qwen3":
            problems.append(
                "model_type=qwen3: SGLang and TensorRT-LLM leave the norms of queries and keys out; use vLLM"
            )
    if head.is_speculators and head.config.get("norm_before_residual") is None:
        problems.append(
            "config.json has no norm_before_residual: vLLM takes true for it, the speculators library false; write it"
        )
    return problems


def _architecture(version: int, engines: set[str]) -> str | None:
    """The name that these engines need; None where any of the known ones will do."""
    if version == 3:
        return EAGLE3_NAMES[0] if "sglang" in engines else None
    names = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
    return names.get(*engines) if len(engines) == 1 else None


def _check_rope(head: HeadFolder) -> list[str]:
    """RoPE stands in `rope_parameters` since transformers 5, before in `rope_theta` and `rope_scaling`."""
    layer = head.layer
    parameters, scaling = layer.get("rope_parameters") or {}, layer.get("rope_scaling") or {}
    if all(part.get("rope_theta") is None for part in (layer, parameters, scaling)):
        return ["rope_theta is written nowhere: engines take 10000; write the one of the training at both places"]
    if head.is_speculators:
        return []  # read by transformers 5 alone
    new = head.layer_config.rope_parameters
    old = {"rope_theta": layer.get("rope_theta", 10000.0), "rope_type": "default", **scaling}
    problems = []
    if layer.get("rope_theta") is None:
        problems.append(
            f"rope_theta is not written at the top level: engines before transformers 5 take 10000 instead of "
            f"{new['rope_theta']:g}; write it there too"
        )
    elif parameters and parameters.get("rope_theta") is None:
        problems.append("rope_parameters has no rope_theta: engines that read it there take 10000; write it there too")
    elif new["rope_theta"] != old["rope_theta"]:
        problems.append(
            f"rope_theta is {old['rope_theta']:g} at the top level and {new['rope_theta']:g} in rope_parameters: "
            f"engines read one or the other; make them equal"
        )
    if _scaling(new) != _scaling(old):
        problems.append(
            f"RoPE is scaled by {_scaling(old) or 'nothing'} in rope_scaling and by {_scaling(new) or 'nothing'} in "
            f"rope_parameters: engines read one or the other; write both alike"
        )
    return problems


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """What there is besides the base; `type` is an older name of `rope_type`. Empty where nothing is scaled."""
    scaling = {"rope_type": rope.get("type"), **rope}
    scaling = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type") and value is not None}
    return {} if scaling.get("rope_type", "default") == "default" else scaling


def _check_taps(head: HeadFolder, engines: set[str], target: Any, tap_ids: Sequence[int] | None) -> list[str]:
    """vLLM reads the list at the top as inputs of blocks, SGLang the one in eagle_config as outputs: one less."""
    at_top, inside = head.tap_inputs, head.tap_outputs
    if head.is_speculators:
        inside = None
    problems = []
    if inside is not None and at_top is None:
        problems.append(
            f"{TAPS_KEY}={inside} stands in eagle_config alone: SGLang reads it as outputs of blocks, vLLM the same "
            f"numbers as inputs, one block off; write {[i + 1 for i in inside]} at the top too"
        )
    if inside is not None and at_top is not None and inside != [i - 1 for i in at_top]:
        problems.append(
            f"shifted taps: {TAPS_KEY} is {at_top} at the top (inputs of blocks, vLLM) and {inside} in eagle_config "
            f"(outputs of blocks, SGLang), which must be one less: {[i - 1 for i in at_top]}"
        )
    needs_inside = engines & {"sglang"} or (at_top is not None and len(at_top) != 3 and not head.is_speculators)
    if inside is None and at_top is not None and needs_inside and not _is_default(at_top):
        problems.append(
            f"{TAPS_KEY}={at_top} stands at the top alone: SGLang reads eagle_config and takes its default; write "
            f"{[i - 1 for i in at_top]} there"
        )
    if at_top is not None and 0 in at_top and engines & {"sglang", "trtllm"}:
        problems.append(
            f"{TAPS_KEY}={at_top}: SGLang and TensorRT-LLM cannot read the embedding's output, block 0's input"
        )
    read = at_top if at_top is not None else None if inside is None else [i + 1 for i in inside]
    if read is None and target is not None:
        read = [2, target.num_hidden_layers // 2, target.num_hidden_layers - 3]
    if tap_ids is not None and (read or tap_ids) and not _agree(read, tap_ids):
        problems.append(_shifted(read, list(tap_ids)))
    num_blocks = None if target is None else target.num_hidden_layers
    if read and num_blocks and not (sorted(set(read)) == list(read) and read[0] >= 0 and read[-1] < num_blocks):
        problems.append(
            f"{TAPS_KEY}: taps {read} must ascend from 0 to {num_blocks - 1} without repeats; write the training's"
        )
    return problems


def _is_default(tap_ids: Sequence[int]) -> bool:
    """Whether they are (2, N//2, N-3) of a target of N blocks, so what every engine takes anyway."""
    num_blocks = tap_ids[-1] + 3
    return list(tap_ids) == [2, num_blocks // 2, num_blocks - 3]


def _agree(read: list[int] | None, tap_ids: Sequence[int]) -> bool:
    """Without a list and without the target only the default is sure to be read right."""
    return _is_default(tap_ids) if read is None else list(tap_ids) == read


def _shifted(read: list[int] | None, tap_ids: list[int]) -> str:
    if read is None:
        return f"{TAPS_KEY} is written nowhere: engines take their default, the head was trained on {tap_ids}; write it"
    by = {ours - theirs for ours, theirs in zip(read, tap_ids)} if len(read) == len(tap_ids) else set()
    what = f"shifted taps, by {by.pop():+d}" if len(by) == 1 else "other taps"
    return f"{what}: engines read the inputs of blocks {read}, the head was trained on {tap_ids}; set {TAPS_KEY} so"


def _check_embedding(
    head: HeadFolder, tensors: dict[str, Tensor], engines: set[str], target_embedding: Tensor | None
) -> list[str]:
    """Random embeddings are the classic fault of a non-strict load before saving."""
    written = tensors.get("embed_tokens.weight")
    if written is None:
        return []
    shape = optional_shapes(head)["embed_tokens.weight"]
    if tuple(written.shape) != shape:
        return [f"embed_tokens.weight has shape {list(written.shape)}, and config.json says {list(shape)}"]
    name = "embed_tokens.weight"
    if target_embedding is None:
        if looks_drawn(written):
            return [
                f"{name} looks like a fresh random table (mean 0, every row alike); write the target's, or leave it out"
            ]
        return []
    theirs = target_embedding.detach().cpu().float()
    if tuple(theirs.shape) != shape:
        return [f"{name} has shape {list(shape)} and the target's embedding {list(theirs.shape)}; write the target's"]
    ours = written.float()
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).mean().item()
    if torch.allclose(ours, theirs, rtol=2**-7, atol=1e-5):  # as rounded by bf16 or fp16
        return []
    if cosine < 0.5:
        return [
            f"{name} has nothing of the target's (mean cosine {cosine:.2f}): random, or another model's; write the "
            f"target's, or leave it out"
        ]
    if "sglang" in engines or "trtllm" in engines:
        return [
            f"{name} was trained (mean cosine {cosine:.3f} with the target's): SGLang replaces it by the target's "
            f"without a word; serve it by vLLM alone, or train with a frozen embedding"
        ]
    return []


def looks_drawn(table: Tensor) -> bool:  # (V, D)
    """Rows of independent equal normals all have nearly one length: var(|row|^2) = 2 D s^4. Trained ones do not."""
    squares = table.float().square()
    lengths = squares.sum(-1)
    lengths = lengths[lengths > 0]  # a padding row is zero
    if len(lengths) < 100:
        return False
    spread = lengths.std() / lengths.mean() / (2 / table.shape[1]) ** 0.5
    return bool(spread < 1.5)


def _check_target(head: HeadFolder, target: Any) -> list[str]:
    c = head.layer_config
    problems = []
    size = head.config.get("target_hidden_size") or c.hidden_size
    if size != target.hidden_size:
        problems.append(f"hidden_size={size}: the target has {target.hidden_size}; fc cannot read its states")
    elif c.hidden_size != target.hidden_size and "embed_tokens.weight" not in head.tensors:
        problems.append(
            f"hidden_size={c.hidden_size} and no embed_tokens.weight: the target's has {target.hidden_size}"
        )
    if c.vocab_size != target.vocab_size:
        problems.append(f"vocab_size={c.vocab_size}: the target has {target.vocab_size}; write the target's")
    positions = getattr(target, "max_position_embeddings", None)
    if positions and c.max_position_embeddings < min(positions, 1 << 20):
        problems.append(
            f"max_position_embeddings={c.max_position_embeddings}: the target serves {positions}, and engines read "
            f"RoPE tables past their end; write the target's"
        )
    return problems
