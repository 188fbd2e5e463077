"""Medusa heads (arXiv:2401.10774): K small heads that read one final state of the target and draft K tokens at once.

Head k = 1..K reads f[t], the target's post-norm final state at t, and predicts x[t+1+k]; x[t+1] is the target's own.
    block    num_hidden_layers times x + SiLU(W x), W zero at first
    logits   its own vocabulary head, at first the target's rows, over a draft vocabulary of Vd ids
No head sees what another one drafts. Tensors have the names that vLLM reads: blocks.{h}.layers.{l}, lm_heads.{h}.

Shapes: K heads, D hidden size of the target, V vocabulary, Vd draft vocabulary.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.eagle import FINAL_HIDDEN, check_widths, load_strictly
from models.errors import UserError
from models.target import Target

ARCHITECTURE = "MedusaModel"


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of the heads, under the names of vLLM's MedusaConfig."""

    num_heads: int  # K
    hidden_size: int
    vocab_size: int  # V, width of the target's embedding
    truncated_vocab_size: int  # Vd
    num_hidden_layers: int = 1  # of each head
    medusa_fc_bias: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"architectures": [ARCHITECTURE], "model_type": "medusa", **asdict(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "MedusaConfig":
        values = {f.name: content[f.name] for f in fields(cls) if f.name in content}
        return cls(**{"truncated_vocab_size": content["vocab_size"], **values})


class MedusaBlock(nn.Module):
    """What a head does before its vocabulary."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        size, bias = config.hidden_size, config.medusa_fc_bias
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(config.num_hidden_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:  # (..., D)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """See the module. Weights in fp32 while training; cast to the target's dtype for decoding."""

    features = FINAL_HIDDEN

    def __init__(self, config: MedusaConfig):
        super().__init__()
        c = self.config = config
        self.blocks = nn.ModuleList(MedusaBlock(c) for _ in range(c.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(c.hidden_size, c.truncated_vocab_size, bias=False) for _ in range(c.num_heads)
        )
        self.register_buffer("token_map", torch.arange(c.truncated_vocab_size))

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_heads[0].weight.dtype

    @property
    def device(self) -> torch.device:
        return self.lm_heads[0].weight.device

    @property
    def draft_vocab(self) -> Tensor:  # (Vd,) target ids
        return self.token_map

    def forward(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:  # (..., D) -> (K, ..., D)
        """What the first `num_heads` heads make of the target's final states."""
        hidden = hidden.to(self.dtype)
        return torch.stack([block(hidden) for block in self.blocks[:num_heads]])

    def logits(self, states: Tensor) -> Tensor:  # (K, ..., D) -> (K, ..., Vd)
        """Logits of each head over the draft vocabulary (`target_ids` translates)."""
        return torch.stack([lm_head(state) for lm_head, state in zip(self.lm_heads, states)])

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.token_map[draft_ids]

    @torch.no_grad()
    def set_vocabulary(self, target_ids: Tensor, rows: list[Tensor]) -> None:  # (Vd,), K x (Vd, D)
        """Draft id i stands for target_ids[i]; rows: what each head's logits come from."""
        assert bool((target_ids.diff() > 0).all()), "ids must ascend"
        self.config = replace(self.config, truncated_vocab_size=len(target_ids))
        self.token_map = target_ids.to(self.device)
        for lm_head, new in zip(self.lm_heads, rows, strict=True):
            lm_head.weight = nn.Parameter(new.to(lm_head.weight, copy=True))
            lm_head.out_features = len(new)

    @torch.no_grad()
    def widen(self) -> None:
        """The same drafts over all V ids, for engines whose heads are as wide as the target.

        A new row is the mean of a head's rows: its logit is the mean of their logits, so never the largest.
        """
        ids, width = self.token_map, self.config.vocab_size
        if len(ids) == width:
            return
        rows = []
        for lm_head in self.lm_heads:
            wide = lm_head.weight.float().mean(0).expand(width, -1).clone()  # (V, D)
            wide[ids] = lm_head.weight.float()
            rows.append(wide)
        self.set_vocabulary(torch.arange(width), rows)

    def keep_heads(self, num_heads: int) -> None:
        """Only the first heads, in place: an engine drafts with all that a folder has."""
        self.config = replace(self.config, num_heads=num_heads)
        self.blocks, self.lm_heads = self.blocks[:num_heads], self.lm_heads[:num_heads]

    def tensors(self) -> dict[str, Tensor]:
        """As saved: without the map where there is nothing to translate."""
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if self.config.truncated_vocab_size == self.config.vocab_size:
            state.pop("token_map")
        return state

    def save_pretrained(self, folder: str | Path) -> None:
        """config.json and model.safetensors, under vLLM's names."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.config.to_json(), "torch_dtype": str(self.dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(self.tensors(), folder / "model.safetensors", metadata={"format": "pt"})


def is_medusa_folder(folder: str | Path) -> bool:
    """Whether a folder's config.json names Medusa heads."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return False
    try:
        return json.loads(path.read_text()).get("model_type") == "medusa"
    except (ValueError, AttributeError):
        return False


def load_medusa(folder: str | Path, target: Target) -> MedusaHeads:
    """Heads as saved, strictly, in fp32 and eval mode, on the CPU. Raises UserError where they do not fit `target`."""
    folder = Path(folder)
    try:
        heads = MedusaHeads(MedusaConfig.from_json(json.loads((folder / "config.json").read_text())))
        state = load_file(folder / "model.safetensors")
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        told = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"draft {folder}: cannot be read as Medusa heads ({told}); save them again") from None
    if heads.config.truncated_vocab_size == heads.config.vocab_size:
        state.setdefault("token_map", heads.token_map)
    load_strictly(heads, state, folder)
    check_widths(heads.config, target, str(folder))
    ids = heads.token_map
    if not bool((ids.diff() > 0).all()) or int(ids[0]) < 0 or int(ids[-1]) >= heads.config.vocab_size:
        raise UserError(f"draft {folder}: token_map is no ascending list of the target's ids; save the heads again")
    is_real = ids < target.vocab_size  # no text has an id that pads the target's embedding
    if not bool(is_real.all()):
        heads.set_vocabulary(ids[is_real], [lm_head.weight[is_real] for lm_head in heads.lm_heads])
    return heads.float().eval()


def build_medusa(
    *,
    target: Target,
    kind: str = "medusa",
    num_heads: int = 4,
    num_layers: int = 1,
    draft_vocab_size: int | None = 8192,
    decay: float = 0.8,
    init: str = "scratch",
    id: None = None,
    seed: int = 0,
    draft_vocab: Tensor | None = None,  # (Vd,) ascending target ids
) -> MedusaHeads:
    """Heads for `target`, in fp32 on the CPU and in train mode: at first each says what the target's own head says.

    num_layers: of each head. draft_vocab_size: Vd, at most the target's ids; None for all. draft_vocab: its ids, by
    default the first Vd. init: `scratch` or the folder of heads of the same shape, whose draft vocabulary stays.
    decay: read by training alone. seed: nothing is drawn. id: heads come from a run's folder, so null.
    Raises UserError naming the key, the value and the fix.
    """
    if kind != "medusa":
        raise UserError(f"draft.kind={kind}: unknown here; use medusa")
    width = draft_vocab_size or target.vocab_size
    if not 1 <= width <= target.vocab_size:
        raise UserError(f"draft.draft_vocab_size={width}: the target has {target.vocab_size} ids; set it to fewer")
    config = MedusaConfig(
        num_heads=num_heads,
        hidden_size=target.hidden_size,
        vocab_size=target.embedding.shape[0],
        truncated_vocab_size=width,
        num_hidden_layers=num_layers,
    )
    if init != "scratch":
        if not is_medusa_folder(init):
            raise UserError(f"draft.init={init}: no Medusa heads there; use scratch or the folder of some")
        before = load_medusa(init, target)
        if before.config != config:
            shapes = ((f.name, getattr(before.config, f.name), getattr(config, f.name)) for f in fields(config))
            name, theirs, ours = next(shape for shape in shapes if shape[1] != shape[2])
            raise UserError(
                f"draft.init={init}: heads of another shape, their {name} is {theirs} and this draft's {ours}; set the "
                f"draft's keys to its config.json"
            )
        return before.train()
    heads = MedusaHeads(config)
    ids = torch.arange(width) if draft_vocab is None else draft_vocab
    rows = target.scaled_rows(ids)  # (Vd, D)
    heads.set_vocabulary(ids, [rows] * num_heads)
    return heads.float().train()
