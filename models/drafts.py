"""Draft models: a small GPT-2 with the target's vocabulary (or any causal LM of transformers), its warm starts, and a
forward over packed rows.

`packed_hidden` is what training calls: rows lie one after another, (N) tokens without padding. Everything but attention
is per token; for attention the rows become right-padded batches, causal, and go back. It plugs in through transformers'
AttentionInterface, so any architecture that uses the interface trains packed.
"""

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from models.eagle import is_eagle_folder
from models.errors import UserError
from models.hub import hub_errors, hub_reachable
from models.target import Target

PACKED = "draftsmith_packed"
MIN_LENGTH_RATIO = (
    0.75  # rows of one padded batch are at least this share of its longest: padding stays below a quarter
)


def build_draft(
    *,
    target: Target,
    kind: str = "gpt2",
    n_layer: int = 6,
    n_head: int = 6,
    n_embd: int = 384,
    n_positions: int = 1024,
    init: str = "scratch",
    id: str | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """The draft of a run, in fp32 on the CPU and in train mode.

    kind: `gpt2`, a new GPT-2 over the target's ids; `hf`, the causal LM at `id` (hub id or folder), as it is.
    init: `scratch`, `target_pca` (see `init_from_target_pca`) or the folder of a model of the same shape.
    Raises UserError naming the key, the value and the fix.
    """
    if kind == "hf":
        if not id:
            raise UserError("draft.id: not given; draft=hf needs draft.id=<hub id or folder>")
        if init != "scratch":
            raise UserError(f"draft.init={init}: draft=hf keeps the weights of draft.id={id}; set draft.init=scratch")
        draft = load_draft(id)
        width = draft.get_output_embeddings().weight.shape[0]
        if width < target.vocab_size:
            raise UserError(
                f"draft.id={id}: its head has {width} ids and the target {target.vocab_size}; take a draft with the "
                f"target's tokenizer"
            )
    elif kind == "gpt2":
        draft = gpt2_draft(
            target.vocab_size,
            n_layer=n_layer,
            n_head=n_head,
            n_embd=n_embd,
            n_positions=n_positions,
            eos_token_ids=target.eos_token_ids,
            seed=seed,
        )
        if init == "target_pca":
            init_from_target_pca(draft, target)
        elif init != "scratch":
            init_from_folder(draft, init)
    else:
        raise UserError(f"draft.kind={kind}: unknown; use gpt2 or hf")
    return draft.float().train()


def gpt2_draft(
    vocab_size: int,
    *,
    n_layer: int = 6,
    n_head: int = 6,
    n_embd: int = 384,
    n_positions: int = 1024,
    eos_token_ids: tuple[int, ...] = (),
    seed: int = 0,
) -> GPT2LMHeadModel:
    """A GPT-2 with tied head; the defaults at 50257 ids have 30.3M parameters.

    `gelu_pytorch_tanh` is the function that GPT-2 calls gelu_new, in one kernel. No dropout: a draft sees its data once
    or twice and is too small to memorise it, and dropout would blur the match with the target.
    """
    if n_embd % n_head:
        raise UserError(f"draft.n_embd={n_embd}: must be a multiple of draft.n_head={n_head}")
    eos = list(eos_token_ids)
    config = GPT2Config(
        vocab_size=vocab_size,
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        n_positions=n_positions,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=eos[0] if eos else None,
        eos_token_id=eos[0] if eos else None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = GPT2LMHeadModel(config)
    draft.generation_config.eos_token_id = eos if len(eos) > 1 else config.eos_token_id
    return draft


@torch.no_grad()
def init_from_target_pca(draft: PreTrainedModel, target: Target) -> None:
    """Token embeddings (and so the tied head) = the target's, centred, on their first principal axes.

    Reason: a draft of few tokens spends most of them on learning which words are alike; the target knows it already.
    The projection keeps the most of its distances that n_embd numbers can. One common scale brings it to the std that
    the draft's embeddings were drawn with, so that everything behind them starts as from scratch. Axes beyond the
    target's width keep their random start.
    """
    ours = draft.get_input_embeddings().weight  # (V, Dd)
    theirs = target.embedding[: target.vocab_size].float().to(ours.device)  # (V, D)
    if ours.shape[0] < target.vocab_size:
        raise UserError(f"draft.init=target_pca: the draft has {ours.shape[0]} ids, the target {target.vocab_size}")
    centred = theirs - theirs.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)  # ascending variance: (D), (D, D)
    num_axes = min(ours.shape[1], axes.shape[1])
    projected = centred @ axes.flip(1)[:, :num_axes]  # (V, n)
    scratch_std = ours.std()
    ours[: target.vocab_size, :num_axes] = projected * (scratch_std / projected.std())
    draft.tie_weights()


def init_from_folder(draft: PreTrainedModel, folder: str) -> None:
    """Load weights of the same shape, every one of them. Raises UserError naming the first that differs."""
    if not Path(folder).is_dir():
        raise UserError(f"draft.init={folder}: no such folder; use scratch, target_pca or a folder with a model")
    theirs, ours = load_draft(folder).state_dict(), draft.state_dict()
    for name in sorted(ours.keys() | theirs.keys()):
        shapes = [tuple(weights[name].shape) if name in weights else "no such weight" for weights in (ours, theirs)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"draft.init={folder}: {name} is {shapes[1]} there and {shapes[0]} in this draft; set the draft's "
                f"shape to that of the folder, or start with draft.init=scratch"
            )
    draft.load_state_dict(theirs, strict=True)
    draft.tie_weights()


def load_draft(source: str | Path) -> PreTrainedModel:
    """A causal LM in fp32 from a folder or the hub, in eval mode. Raises UserError when there is none."""
    path = str(source)
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().is_dir():
        raise UserError(f"draft.id={path}: no such folder; give a folder in transformers' layout or a hub id")
    path = str(Path(path).expanduser())
    if is_eagle_folder(path):  # its config.json says llama: transformers would load it with random weights
        raise UserError(
            f"draft {path}: an EAGLE head and no language model; train it on by draft=eagle3 draft.init={path}"
        )
    with hub_errors("draft.id", path):
        offline = not (Path(path).is_dir() or hub_reachable())
        config = AutoConfig.from_pretrained(path, local_files_only=offline)
        return AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, local_files_only=offline
        ).eval()


def max_positions(draft: PreTrainedModel) -> int:
    """Longest row that the draft can read."""
    return getattr(draft.config.get_text_config(), "max_position_embeddings", None) or 1 << 30


# --- packed rows -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedLayout:
    """Where packed tokens lie once rows of similar length have become padded batches, one batch after another."""

    packed: Tensor | None  # (N) int64 places in the pack; None: rows of one length, which need no move
    padded: Tensor | None  # (N) int64 places among the padded tokens
    shapes: tuple[tuple[int, int], ...]  # (rows, length) of each batch, longest first

    @property
    def num_padded(self) -> int:
        return sum(rows * length for rows, length in self.shapes)


_layout: ContextVar[PaddedLayout] = ContextVar("layout of the packed rows in this forward")


def padded_layout(row_offsets: Tensor, device: torch.device) -> PaddedLayout:  # (R+1,)
    offsets = row_offsets.cpu().long()
    lengths = offsets.diff()  # (R)
    if bool((lengths == lengths[0]).all()):
        return PaddedLayout(None, None, ((len(lengths), int(lengths[0])),))
    order = torch.argsort(lengths, descending=True, stable=True)
    packed, padded, shapes, start, base = [], [], [], 0, 0
    while start < len(order):
        longest = int(lengths[order[start]])
        end = start + int((lengths[order[start:]] >= MIN_LENGTH_RATIO * longest).sum())
        rows = order[start:end]
        steps = torch.arange(longest)  # (T)
        is_token = steps < lengths[rows, None]  # (B, T)
        packed.append((offsets[rows, None] + steps)[is_token])  # (n)
        padded.append(is_token.flatten().nonzero().squeeze(1) + base)  # (n)
        shapes.append((len(rows), longest))
        start, base = end, base + len(rows) * longest
    return PaddedLayout(torch.cat(packed).to(device), torch.cat(padded).to(device), tuple(shapes))


class _Move(torch.autograd.Function):
    """out[to] = x[at] along dimension 0, zeros elsewhere. No index comes twice, so backward is the reverse move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Tensor, to: Tensor, size: int) -> Tensor:
        ctx.indices, ctx.size = (at, to), x.shape[0]
        return x.new_zeros((size, *x.shape[1:])).index_copy_(0, to, x.index_select(0, at))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        at, to = ctx.indices
        return (
            grad.new_zeros((ctx.size, *grad.shape[1:])).index_copy_(0, at, grad.index_select(0, to)),
            None,
            None,
            None,
        )


def packed_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, N, Dh)
    key: Tensor,  # (1, Hkv, N, Dh)
    value: Tensor,  # (1, Hkv, N, Dh)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (1, N, H, Dh)
    """Causal attention inside each row, as an attention function of transformers."""
    layout = _layout.get()
    if sliding_window is not None and layout.shapes[0][1] > sliding_window:
        raise UserError(
            f"data.max_length: rows of {layout.shapes[0][1]} tokens are longer than the draft's attention window of "
            f"{sliding_window}; lower data.max_length"
        )
    num_tokens, num_heads = query.shape[2], query.shape[1]
    padded = [x[0].transpose(0, 1) for x in (query, key, value)]  # (N, H, Dh)
    if layout.packed is not None:
        padded = [_Move.apply(x, layout.packed, layout.padded, layout.num_padded) for x in padded]
    outputs, start = [], 0
    for num_rows, length in layout.shapes:
        size = num_rows * length
        batch = [x[start : start + size].unflatten(0, (num_rows, length)).transpose(1, 2) for x in padded]
        if batch[1].shape[1] != num_heads:  # grouped queries: each key head serves several query heads
            batch[1:] = [x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in batch[1:]]
        output = F.scaled_dot_product_attention(*batch, dropout_p=dropout, is_causal=True, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))  # (B, H, T, Dh) -> (B * T, H, Dh)
        start += size
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if layout.packed is not None:
        output = _Move.apply(output, layout.padded, layout.packed, num_tokens)  # (N, H, Dh)
    return output[None], None


AttentionInterface.register(PACKED, packed_attention)


def packed_hidden(
    draft: PreTrainedModel,
    input_ids: Tensor,  # (N)
    position_ids: Tensor,  # (N) restarting with each row
    row_offsets: Tensor,  # (R+1,)
) -> Tensor:  # (N, Dd)
    """The draft's final hidden states (what its head reads) of packed rows, equal to those of each row alone.

    The draft's config is as before afterwards: nothing of this is ever saved with a model.
    """
    config = draft.config.get_text_config()
    before = config._attn_implementation
    token = _layout.set(padded_layout(row_offsets, input_ids.device))
    config._attn_implementation = PACKED
    try:
        output = draft.base_model(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False)
    finally:
        config._attn_implementation = before
        _layout.reset(token)
    return output.last_hidden_state[0]
