"""Keys and values of a decoded sequence in preallocated buffers, with rollback. The only file that touches
transformers' cache API.

1. `RollbackCache.for_model(model, capacity)` allocates on the first forward; nothing is concatenated afterwards.
2. `forward_with_cache` writes new keys and values behind `cache.length`.
3. `cache.rollback(length)` forgets rejected tokens: an integer moves, the next forward overwrites them.

On the CPU attention sees a view of the valid part. On CUDA (`static=True`) it sees the whole buffer and a mask, and
slots are written by index: shapes stay the same from step to step, so that CUDA graphs can be captured.
"""

import inspect
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import ModelOutput

from models.attention import decoding_attention
from models.errors import UserError

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


class RollbackLayer(DynamicLayer):
    """Buffers of one block; `length` slots of `capacity` are valid."""

    def __init__(self, capacity: int, static: bool):
        super().__init__()
        self.capacity, self.static = capacity, static
        self.length = 0
        self.slots: Tensor | None = None  # (T,) where the next update writes, static mode only

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        # zeros where masked slots are read: 0 * garbage may be nan
        allocate = torch.zeros if self.static else torch.empty
        shape = (*key_states.shape[:2], self.capacity)
        self.keys = allocate(*shape, key_states.shape[-1], dtype=self.dtype, device=self.device)
        self.values = allocate(*shape, value_states.shape[-1], dtype=self.dtype, device=self.device)
        self.is_initialized = True

    def update(
        self,
        key_states: Tensor,  # (B, H, T, Dh)
        value_states: Tensor,  # (B, H, T, Dv)
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:  # (B, H, length or capacity, Dh), (.., Dv)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[-2]
        assert self.length <= self.capacity, f"{self.length} tokens in a cache of {self.capacity}"
        if self.static:
            slots = self.slots.to(self.keys.device)
            self.keys.index_copy_(2, slots, key_states)
            self.values.index_copy_(2, slots, value_states)
            return self.keys, self.values
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        if isinstance(query_length, Tensor):  # older versions hand over the positions
            query_length = query_length.shape[0]
        return (self.capacity if self.static else self.length + query_length), 0

    def get_seq_length(self, *args: object) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # the name in older versions

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)


class RollbackCache(Cache):
    """One `RollbackLayer` a block. Layers with a sliding window keep all their keys and rely on their mask."""

    layer_class = RollbackLayer

    def __init__(self, num_layers: int, capacity: int, *, static: bool, window: bool = False):
        super().__init__(layers=[self.layer_class(capacity, static) for _ in range(num_layers)])
        self.capacity, self.static = capacity, static
        self.own_mask = not window  # else transformers builds it
        self._positions: Tensor | None = None  # (1, capacity) 0, 1, 2, ...

    @classmethod
    def for_model(cls, model: nn.Module, capacity: int) -> "RollbackCache":
        """An empty cache for up to `capacity` tokens. Raises UserError where blocks keep no keys and values (Mamba)."""
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        if kinds - ATTENTION_LAYERS:
            raise UserError(
                f"target or draft {type(model).__name__}: layers of kind {', '.join(sorted(kinds - ATTENTION_LAYERS))} "
                "cannot be rolled back; use a model with attention layers only"
            )
        window = bool(kinds - {"full_attention"}) or getattr(config, "sliding_window", None) is not None
        window = window or getattr(config, "alibi", False)  # Falcon adds its biases by place to a mask of its own
        static = model.device.type == "cuda" and config._attn_implementation == "sdpa" and not window
        window = window or config._attn_implementation != "sdpa"
        capacity = -(-capacity // 64) * 64 if static else capacity  # attention kernels want aligned masks
        return cls(config.num_hidden_layers, capacity, static=static, window=window)

    @property
    def length(self) -> int:
        """Tokens whose keys and values are valid."""
        return self.layers[0].length

    def rollback(self, length: int) -> None:
        """Keep the first `length` tokens."""
        assert 0 <= length <= self.length, (length, self.length)
        for layer in self.layers:
            layer.length = length

    def gather(self, start: int, slots: Tensor) -> None:  # slots (A,)
        """Keep the first `start` tokens, then those at `slots`, in this order (an accepted path of a tree). In place:
        static buffers stay where they are."""
        for layer in self.layers:
            own = slots.to(layer.keys.device)
            layer.keys[:, :, start : start + len(slots)] = layer.keys[:, :, own]
            layer.values[:, :, start : start + len(slots)] = layer.values[:, :, own]
            layer.length = start + len(slots)

    def join(self, parts: Sequence[tuple["RollbackCache", Tensor]], length: int) -> None:
        """Take the given batch rows (R,) of other caches, all rows ending at slot `length`; this cache is empty before.

        The parts lose their buffers block by block, so that memory holds one more block, not a second cache.
        """
        for index, layer in enumerate(self.layers):
            sources = [(part.layers[index], rows) for part, rows in parts]
            num_rows = sum(len(rows) for _, rows in sources)
            for name in ("keys", "values"):
                buffers = [getattr(source, name) for source, _ in sources]
                shape = (num_rows, buffers[0].shape[1], layer.capacity, buffers[0].shape[3])
                joined = torch.zeros(shape, dtype=buffers[0].dtype, device=buffers[0].device)  # (B, H, S, Dh)
                first = 0
                for buffer, (source, rows) in zip(buffers, sources):
                    kept = min(length, source.length)  # the longest row may have left
                    joined[first : first + len(rows), :, length - kept : length] = buffer[
                        rows.to(buffer.device), :, source.length - kept : source.length
                    ]
                    first += len(rows)
                setattr(layer, name, joined)
            for source, _ in sources:
                source.keys = source.values = None
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
            layer.is_initialized, layer.length = True, length

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:  # (1, T)
        """Positions of the next `num_tokens` tokens of a chain."""
        if self._positions is None:
            self._positions = torch.arange(self.capacity, device=device)[None]
        return self._positions[:, self.length : self.length + num_tokens]

    def causal_mask(self, num_tokens: int, device: torch.device) -> Tensor | None:  # (1, 1, T, S) bool
        """Mask of the next `num_tokens` tokens of a chain. None where attention needs none."""
        end = self.length + num_tokens
        if not self.own_mask or (not self.static and (num_tokens == 1 or self.length == 0)):
            return None
        rows = self.positions(num_tokens, device)  # (1, T)
        slots = self._positions[:, : self.capacity if self.static else end]  # (1, S)
        return (slots <= rows.T)[None, None]

    def tree_mask(self, visible: Tensor) -> Tensor:  # (T, R) bool -> (1, 1, T, S) bool
        """Mask of the next T tokens when they are nodes of a tree: all of them see the tokens before the tree, and of
        the tree's R nodes (those that the cache holds already, then these T) what `visible` says.

        Raises UserError where transformers must build the mask itself.
        """
        if not self.own_mask:
            raise UserError(
                "decode.methods: trees need full attention by SDPA, and a model here has a sliding window or another "
                "attention kernel; use chains such as chain_k4"
            )
        num_new, num_nodes = visible.shape
        end = self.length + num_new
        mask = visible.new_zeros(1, 1, num_new, self.capacity if self.static else end)
        mask[..., : end - num_nodes] = True
        mask[..., end - num_nodes : end] = visible
        return mask


def has_own_mask(model: nn.Module) -> bool:
    """Whether our masks reach the model's attention: trees, and batches of ragged rows, need that."""
    return RollbackCache.for_model(model, 1).own_mask


def rotation_switch(model: nn.Module) -> int:
    """Tokens up to which a forward takes longrope's first rotations; beyond them all of its tokens take the second. So
    a block across it would judge its first tokens by other logits than plain decoding. 0: no such thing."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return 0
    name = "original_max_position_embeddings"
    return rope.get(name) or getattr(config, name, None) or 0


def forward_with_cache(
    model: nn.Module,
    input_ids: Tensor,  # (B, T) tokens behind those in the cache
    cache: RollbackCache,
    *,
    position_ids: Tensor | None = None,  # (B, T), default: cache.length, cache.length + 1, ...
    attention_mask: Tensor | None = None,  # (B, S) bool, False on pads, or (B, 1, T, S) for SDPA; default: causal
    logits_to_keep: int = 0,  # logits of the last so many positions; 0: of all
) -> ModelOutput:
    """Run `model` on new tokens and append their keys and values to `cache`.

    A causal LM gives `.logits` (B, T or logits_to_keep, V), a base model `.last_hidden_state` (B, T, D).
    """
    num_tokens = input_ids.shape[1]
    if position_ids is None:
        position_ids = cache.positions(num_tokens, input_ids.device)
    if cache.static:
        slots = cache.positions(num_tokens, input_ids.device)[0]
        for layer in cache.layers:
            layer.slots = slots
    if attention_mask is None:
        attention_mask = cache.causal_mask(num_tokens, input_ids.device)
    cache_name, keeps_logits = _forward_arguments(type(model))
    options = {"logits_to_keep": logits_to_keep} if keeps_logits else {}
    with decoding_attention(model):
        return model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=True,
            **{cache_name: cache},
            **options,
        )


@lru_cache
def _forward_arguments(model_class: type) -> tuple[str, bool]:
    """Name of the cache argument (`cache` since 5.24, before it `past_key_values`), and whether logits can be cut."""
    names = inspect.signature(model_class.forward).parameters
    return ("cache" if "cache" in names else "past_key_values"), "logits_to_keep" in names
