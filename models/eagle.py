"""EAGLE-1 and EAGLE-3 heads: one Llama block that drafts from the target's own hidden states.

EAGLE-3 (arXiv:2503.01840), slot t: g[t] = fc(three taps of the target at t), or what the slot before put out;
    q, k, v read [input_layernorm(embed(x[t+1])), hidden_norm(g[t])]; residual = g[t]; RoPE position t
    logits of x[t+2] = lm_head(norm(output)) over a draft vocabulary of Vd ids; the *un-normed* output is fed back
EAGLE-1 (arXiv:2401.15077), slot t: f[t] = the target's post-norm final state, or what the slot before put out;
    the block reads fc([embed(x[t+1]), f[t]]); logits by the target's frozen head; the output is the next feature

The same module trains and decodes, and its tensors have the names that serving engines read.

Shapes: B batch, T time, D hidden size of the target, L tapped layers, V vocabulary, Vd draft vocabulary.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.attention import attend
from models.errors import UserError
from models.head_folder import vocabulary_problem
from models.kv_cache import RollbackCache
from models.target import Target

ARCHITECTURES = {3: "LlamaForCausalLMEagle3", 1: "EagleLlamaForCausalLM"}
KINDS = {"eagle3": 3, "eagle1": 1}
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
TAPS = "taps"
FINAL_HIDDEN = "final_hidden"


@dataclass(frozen=True)
class EagleConfig:
    """Shape of a head; `rope_parameters` as in transformers 5 (theta and scaling in one).

    The VARIANTS stand in heads made elsewhere (the `speculators` library's names, but for qk_norm); EAGLE-3 only.
    """

    version: int  # 3 or 1
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # V, width of the target's embedding
    draft_vocab_size: int  # Vd; V for EAGLE-1
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    tap_ids: tuple[int, ...] = ()  # residual streams entering these blocks; () for EAGLE-1
    norm_before_residual: bool = False  # the residual is hidden_norm(g), not g
    norm_before_fc: bool = False  # fc reads RMSNorm of the joined taps
    fc_norm: bool = False  # fc reads each tap through an RMSNorm of its own
    norm_output: bool = False  # the output is normed before it is fed back
    qk_norm: bool = False  # queries and keys are normed in each attention head, as in Qwen3

    def __post_init__(self) -> None:
        assert self.version in ARCHITECTURES
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"draft.num_key_value_heads={self.num_key_value_heads}: must divide draft.num_attention_heads="
                f"{self.num_attention_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(
                f"draft.num_attention_heads={self.num_attention_heads}: leaves heads of {self.head_dim} channels, and "
                f"rotary positions need an even number; set one that divides {self.hidden_size} so"
            )
        object.__setattr__(self, "tap_ids", tuple(self.tap_ids))

    def rope_config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
        )

    def to_json(self) -> dict[str, Any]:
        """config.json: the fields that engines read, and ours under the same names."""
        config = asdict(self)
        version, tap_ids = config.pop("version"), config.pop("tap_ids")
        config = {key: value for key, value in config.items() if value or key not in VARIANTS}
        return {
            "architectures": [ARCHITECTURES[version]],
            "model_type": "llama",
            "eagle_version": version,
            **config,
            "rope_theta": self.rope_parameters["rope_theta"],
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **({"eagle_aux_hidden_state_layer_ids": list(tap_ids)} if version == 3 else {}),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "EagleConfig":
        version = {name: v for v, name in ARCHITECTURES.items()}.get((content.get("architectures") or [""])[0])
        if version is None:
            raise UserError(
                f"draft: architectures={content.get('architectures')} is no EAGLE head; use one of "
                f"{', '.join(ARCHITECTURES.values())}"
            )
        known = {f.name for f in fields(cls)} - {"version", "tap_ids"}
        values = {key: value for key, value in content.items() if key in known}
        return cls(version=version, tap_ids=tuple(content.get("eagle_aux_hidden_state_layer_ids", ())), **values)


class EagleAttention(nn.Module):
    """Grouped-query attention with RoPE; reads `width` features, writes D."""

    def __init__(self, config: EagleConfig, width: int):
        super().__init__()
        c = config
        self.num_heads, self.num_kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(width, self.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * c.head_dim, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(
        self,
        x: Tensor,  # (B, T, width)
        rope: tuple[Tensor, Tensor],  # cos, sin (B, T, Dh)
        cache: RollbackCache | None,
        attention_mask: Tensor | None,  # (B, 1, T, S) bool
    ) -> Tensor:  # (B, T, D)
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T, Dh)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = (each[:, None].to(q.dtype) for each in rope)  # (B, 1, T, Dh)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.layers[0].update(k, v)  # (B, Hkv, S, Dh)
        out = attend(q, k, v, attention_mask)  # (B, H, T, Dh)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (..., Dh)
    """Rotary position embedding in Llama's half-split layout."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class EagleMLP(nn.Module):
    def __init__(self, config: EagleConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleBlock(nn.Module):
    """The one transformer block. EAGLE-3 norms embedding and state apart and reads both; EAGLE-1 reads fc's output."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = EagleAttention(config, 2 * size if config.version == 3 else size)
        self.mlp = EagleMLP(config)
        if config.version == 3:
            self.input_layernorm = nn.RMSNorm(size, eps)
            self.hidden_norm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)


class EagleHead(nn.Module):
    """See the module. Weights in fp32 while training; cast to the target's dtype for decoding.

    target_head: post-norm states (..., D) -> logits (..., V), EAGLE-1 only; frozen and never saved.
    """

    def __init__(self, config: EagleConfig, *, target_head: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        if c.version == 3:
            self.fc = nn.Linear(len(c.tap_ids) * c.hidden_size, c.hidden_size, bias=False)
            self.register_buffer("tap_scale", torch.ones(self.fc.in_features))
            if c.norm_before_fc:
                self.input_norm = nn.RMSNorm(self.fc.in_features, c.rms_norm_eps)
            if c.fc_norm:
                self.fc_norm = nn.ModuleList(nn.RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in c.tap_ids)
            self.midlayer = EagleBlock(c)
            self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
            self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))
        else:
            self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
            self.layers = nn.ModuleList([EagleBlock(c)])
        self.__dict__["target_head"] = target_head
        self.rotary = LlamaRotaryEmbedding(c.rope_config())

    @property
    def features(self) -> str:
        """What the head reads of the target's forwards: `taps` or `final_hidden`."""
        return TAPS if self.config.version == 3 else FINAL_HIDDEN

    @property
    def block(self) -> EagleBlock:
        return self.midlayer if self.config.version == 3 else self.layers[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def project(self, features: Tensor) -> Tensor:  # (..., L, D) or (..., D) -> (..., D)
        """The target's features as the state that slots read: fc of the taps, or the final state as it is."""
        if self.config.version == 1:
            return features.to(self.dtype)
        if self.config.fc_norm:
            taps = features.to(self.dtype).unbind(-2)
            features = torch.stack([norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)], dim=-2)
        joined = features.flatten(-2).to(self.dtype)  # (..., 3D)
        if self.config.norm_before_fc:
            joined = self.input_norm(joined)
        return self.fc(joined * self.tap_scale.to(self.dtype))

    @torch.no_grad()
    def set_tap_scale(self, taps: Tensor, *, keep_function: bool) -> None:  # (N, L, D)
        """Let `fc` read every channel at unit size: tap_scale = 1 / rms over these tokens. keep_function: adapt fc.

        Channels of a residual stream differ a hundredfold; without this the largest drown the block's own output, and
        one learning rate fits none of them. `save_pretrained` folds the factors into fc, so saved heads have none.
        """
        scale = taps.flatten(-2).float().square().mean(0).clamp(min=1e-12).rsqrt()  # (3D,)
        if keep_function:
            self.fc.weight.mul_(self.tap_scale / scale)
        self.tap_scale.copy_(scale)

    def forward(
        self,
        input_ids: Tensor,  # (B, T) the token behind each slot: x[t+1]
        hidden: Tensor,  # (B, T, D) g: `project`ed features, or outputs fed back
        position_ids: Tensor,  # (B, T) of the slots
        cache: RollbackCache | None = None,
        attention_mask: Tensor | None = None,  # (B, 1, T, S) bool over cached and new slots; None: causal over T
    ) -> Tensor:  # (B, T, D) un-normed, but for norm_output
        """Outputs of the slots; with a cache, their keys and values are appended to it.

        Without a mask several new slots see one another causally, which is right for an empty cache only.
        """
        block = self.block
        rope = self.rotary(hidden.float(), position_ids)  # cos, sin (B, T, Dh) in fp32
        embedded = self.embed_tokens(input_ids)  # (B, T, D)
        if self.config.version == 3:
            normed = block.hidden_norm(hidden)
            x = torch.cat((block.input_layernorm(embedded), normed), dim=-1)  # (B, T, 2D)
            hidden = normed if self.config.norm_before_residual else hidden
        else:
            x = hidden = self.fc(torch.cat((embedded, hidden), dim=-1)).to(self.dtype)  # autocast leaves it in bf16
        hidden = hidden + block.self_attn(x, rope, cache, attention_mask)
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:  # (..., D) -> (..., Vd)
        """Logits over the draft vocabulary (`target_ids` translates)."""
        if self.config.version == 1:
            return self.target_head(hidden)
        return self.lm_head(hidden if self.config.norm_output else self.norm(hidden))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> target ids: id + d2t[id]."""
        return draft_ids + self.d2t[draft_ids] if self.config.version == 3 else draft_ids

    def set_draft_vocab(self, target_ids: Tensor) -> None:  # (Vd,) ascending
        """Draft id i stands for target_ids[i]: fills d2t (offsets) and t2d."""
        assert self.config.version == 3 and len(target_ids) == self.config.draft_vocab_size
        assert bool((target_ids.diff() > 0).all()), "ids must ascend"
        self.d2t.copy_(target_ids - torch.arange(len(target_ids)))
        self.t2d.zero_()[target_ids] = True

    @property
    def draft_vocab(self) -> Tensor:  # (Vd,) target ids
        """All of them, in order, for an EAGLE-1 head, which has no map."""
        return self.target_ids(torch.arange(self.config.draft_vocab_size, device=self.device))

    def save_pretrained(self, folder: str | Path) -> None:
        """config.json and model.safetensors, under the engines' names."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        dtype = str(self.dtype).removeprefix("torch.")
        config = {**self.config.to_json(), "torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        if self.config.version == 3:
            scale = state.pop("tap_scale")
            state["fc.weight"] = (self.fc.weight.detach().float() * scale.float()).to(self.dtype)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def is_eagle_folder(folder: str | Path) -> bool:
    """Whether a folder's config.json names an EAGLE head."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return False
    try:
        architectures = json.loads(path.read_text()).get("architectures") or []
    except (ValueError, AttributeError):
        return False
    return any(name in ARCHITECTURES.values() for name in architectures)


def load_eagle(folder: str | Path, target: Target) -> EagleHead:
    """A head as saved, strictly, in fp32 and eval mode, on the CPU. Raises UserError where it does not fit `target`."""
    folder = Path(folder)
    try:
        config = EagleConfig.from_json(json.loads((folder / "config.json").read_text()))
        head = EagleHead(config, target_head=target.logits)
        state = load_file(folder / "model.safetensors")
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        told = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"draft {folder}: cannot be read as a head ({told}); save it again") from None
    if config.version == 3 and not config.tap_ids:
        raise UserError(
            f"draft {folder}: names no taps, so it is a head as engines read it; give the run's folder, or make one of "
            f"it by python -m train.import_head folder={folder}"
        )
    if config.version == 3:
        state["tap_scale"] = head.tap_scale  # folded into fc
    load_strictly(head, state, folder)
    check_fits(head.config, target, str(folder))
    if config.version == 3 and (problem := vocabulary_problem(head.d2t, head.t2d, config.vocab_size)):
        raise UserError(f"draft {folder}: {problem}")
    drop_padded_ids(head, target)
    return head.float().eval()


def load_strictly(head: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
    """Raises UserError, naming a tensor, unless `state` has every tensor of the head, in its shape, and no other."""
    if differing := sorted(state.keys() ^ head.state_dict().keys()):
        raise UserError(f"draft {folder}: tensor {differing[0]} is missing or unknown; save the draft again")
    try:
        head.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise UserError(f"draft {folder}: {str(error).splitlines()[-1].strip()}; save the draft again") from None


@torch.no_grad()
def drop_padded_ids(head: EagleHead, target: Target) -> None:
    """Take ids that no text of the target has out of the draft vocabulary of a head made elsewhere."""
    ids = torch.arange(target.vocab_size)
    if head.config.version == 3:
        is_real = head.draft_vocab < target.vocab_size  # (Vd,)
        if bool(is_real.all()):
            return
        ids, rows = head.draft_vocab[is_real], head.lm_head.weight[is_real]
        head.lm_head = nn.Linear(head.config.hidden_size, len(ids), bias=False)
        head.lm_head.weight.copy_(rows)
        head.d2t = ids - torch.arange(len(ids))
        head.t2d.zero_()[ids] = True
    head.config = replace(head.config, draft_vocab_size=len(ids))


def check_widths(config: EagleConfig, target: Target, name: str) -> None:
    """Raises UserError unless the head was made for this target's widths."""
    for what, theirs, ours in (
        ("hidden size", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.embedding.shape[0]),
    ):
        if theirs != ours:
            raise UserError(f"draft {name}: made for a target with {what} {theirs}, this one has {ours}")


def check_fits(config: EagleConfig, target: Target, name: str) -> None:
    """Raises UserError unless the head was made for this target's widths and taps."""
    check_widths(config, target, name)
    if config.version == 3 and config.tap_ids != target.tap_ids:
        wanted = str(list(config.tap_ids)).replace(" ", "")
        raise UserError(
            f"draft {name}: reads the taps {list(config.tap_ids)} and the target was loaded with "
            f"{target.tap_ids and list(target.tap_ids)}; set target.tap_ids={wanted}"
        )


def build_eagle(
    *,
    target: Target,
    kind: str = "eagle3",
    draft_vocab_size: int | None = 8192,
    train_lm_head: bool = True,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    init: str = "scratch",
    id: None = None,
    simulation: dict | None = None,
    seed: int = 0,
    draft_vocab: Tensor | None = None,  # (Vd,) ascending target ids
) -> EagleHead:
    """A head for `target`, in fp32 on the CPU and in train mode; shapes default to those of the target's own blocks.

    draft_vocab_size: Vd, at most the target's ids; None for all. draft_vocab: its ids, by default the first Vd.
    train_lm_head: whether `lm_head`, initialised from the target's rows, is trained.
    init: `scratch` or the folder of a head of the same shape.
    kind: eagle3 or eagle1. simulation: read by training alone. id: heads come from a run's folder, so null.
    Raises UserError naming the key, the value and the fix.
    """
    if kind not in KINDS:
        raise UserError(f"draft.kind={kind}: unknown; use {' or '.join(KINDS)}")
    version = KINDS[kind]
    check_target_head(target, kind, train_lm_head=train_lm_head)
    config = eagle_config(
        target,
        version=version,
        draft_vocab_size=draft_vocab_size,
        intermediate_size=intermediate_size,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(config, target_head=target.logits)
        for module in head.block.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5 / 2)
        if version == 3:
            init_fc(head)
    with torch.no_grad():
        head.embed_tokens.weight.copy_(target.embedding.float())
        if version == 3:
            ids = torch.arange(config.draft_vocab_size) if draft_vocab is None else draft_vocab
            head.set_draft_vocab(ids)
            head.lm_head.weight.copy_(target.scaled_rows(ids))
            head.lm_head.weight.requires_grad_(train_lm_head)
    if init != "scratch":
        if not is_eagle_folder(init):
            raise UserError(f"draft.init={init}: no EAGLE head there; use scratch or the folder of one")
        before = load_eagle(init, target)
        config = replace(config, max_position_embeddings=before.config.max_position_embeddings)  # no weight has it
        if before.config != config:
            shapes = ((f.name, getattr(before.config, f.name), getattr(config, f.name)) for f in fields(config))
            name, theirs, ours = next(shape for shape in shapes if shape[1] != shape[2])
            if name in VARIANTS:
                raise UserError(f"draft.init={init}: a head with {name}, which can be judged but not trained further")
            if name in ("head_dim", "rms_norm_eps", "rope_parameters"):
                raise UserError(
                    f"draft.init={init}: its {name} is {theirs}, a head for this target has {ours}, and no key sets "
                    "it; such a head can be judged, not trained further"
                )
            raise UserError(
                f"draft.init={init}: a head of another shape, its {name} is {theirs} and this draft's {ours}; set the "
                f"draft's keys to its config.json"
            )
        head.load_state_dict(before.state_dict())
    return head.float().train()


def check_target_head(target: Target, kind: str, *, train_lm_head: bool) -> None:
    """Raises UserError where the target's own head does what this kind of head cannot learn with."""
    has_bias = target.model.get_output_embeddings().bias is not None
    if kind == "eagle1" and (has_bias or target.scales_logits):
        what = "has a bias" if has_bias else "is followed by a scale or a cap of its logits"
        raise UserError(
            f"draft.kind=eagle1: the head of {target.name} {what}, which this loss cannot; use draft=eagle3"
        )
    if kind == "eagle3" and has_bias and not train_lm_head:
        raise UserError(
            f"draft.train_lm_head=false: the head of {target.name} has a bias, which frozen rows of it would lack; set "
            "it to true"
        )


@torch.no_grad()
def init_fc(head: EagleHead) -> None:
    """fc starts as the last tap as it is, with a little of everything: the state nearest to the target's answer."""
    weight = head.fc.weight
    nn.init.normal_(weight, std=0.1 * weight.shape[1] ** -0.5)
    weight[:, -head.config.hidden_size :] += torch.eye(head.config.hidden_size)


def eagle_config(
    target: Target,
    *,
    version: int,
    draft_vocab_size: int | None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
) -> EagleConfig:
    """Shape of a head for `target`. GPT-2 targets get a Llama block too, with RoPE and an MLP of 8/3 D."""
    c, size = target.config, target.hidden_size
    if version == 3 and not target.tap_ids:
        raise UserError("target.tap_ids=null: an EAGLE-3 head reads taps; set target.tap_ids=default")
    if version == 1 and (draft_vocab_size or target.vocab_size) != target.vocab_size:
        raise UserError(
            f"draft.draft_vocab_size={draft_vocab_size}: EAGLE-1 drafts by the target's own head; set it to null"
        )
    width = draft_vocab_size or target.vocab_size
    if not 1 <= width <= target.vocab_size:
        raise UserError(f"draft.draft_vocab_size={width}: the target has {target.vocab_size} ids; set it to fewer")
    num_heads = num_attention_heads or c.num_attention_heads
    if size % num_heads:
        raise UserError(f"draft.num_attention_heads={num_heads}: must divide the target's hidden size of {size}")
    num_kv_heads = num_key_value_heads or min(num_heads, getattr(c, "num_key_value_heads", None) or num_heads)
    if num_key_value_heads is None and num_heads % num_kv_heads:  # blame what was set
        raise UserError(
            f"draft.num_attention_heads={num_heads}: no multiple of the target's {num_kv_heads} key and value heads; "
            f"set it to one, or set draft.num_key_value_heads too"
        )
    head_dim = getattr(c, "head_dim", None) or size // num_heads
    rope = getattr(c, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    if "rope_theta" not in rope:  # by kind of layer (Gemma 3): the head attends in full
        rope = rope.get("full_attention") or next(iter(rope.values()))
    if (rope.get("partial_rotary_factor") or 1) != 1 and "short_factor" in rope:  # factors of that share
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return EagleConfig(
        version=version,
        hidden_size=size,
        intermediate_size=intermediate_size or getattr(c, "intermediate_size", None) or -(-8 * size // 3 // 64) * 64,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=target.embedding.shape[0],
        draft_vocab_size=width,
        max_position_embeddings=min(target.max_positions, 1 << 20),
        rms_norm_eps=getattr(c, "rms_norm_eps", None) or 1e-5,
        # the head rotates all of its channels, whatever share the target does
        rope_parameters={key: value for key, value in rope.items() if key != "partial_rotary_factor"},
        tap_ids=target.tap_ids or () if version == 3 else (),
    )
