"""Frozen linear layers that keep a copy of their weights in the layout of the processor's matrix kernels.

At the few rows of a decoding step a linear layer is a walk over its weights. oneDNN wants them in blocks; given a plain
matrix it lays them out anew, or takes a slow kernel, at every call. Packed once, the same product (bit for bit in bf16)
reads memory at the machine's rate. The plain weights stay: state dicts, fingerprints and saving see no difference.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

LARGEST_BYTES = 4 << 30  # of weights in a model: packing doubles them in memory


class Packed:
    """A weight in oneDNN's layout, and what it was made from. It is not copied or pickled with its layer."""

    def __init__(self) -> None:
        self.source: tuple[Any, ...] | None = None
        self.weight: Tensor | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Packed, ()

    def of(self, weight: Tensor, *, transposed: bool) -> Tensor:
        """The packed copy of this weight, made anew where it has changed since."""
        source = (weight.data_ptr(), None if weight.is_inference() else weight._version, weight.dtype, weight.shape)
        if self.source != source:
            plain = weight.detach().t().contiguous() if transposed else weight.detach()
            self.weight, self.source = torch.ops.mkldnn._reorder_linear_weight(plain), source
        return self.weight


def _packs(x: Tensor, weight: Tensor) -> bool:
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return x.dtype == weight.dtype and weight.device.type == "cpu" and can_pack(weight.dtype) and not needs_grad


class PackedLinear(nn.Linear):
    """An `nn.Linear` whose product without gradients reads the packed copy; else it is the plain one."""

    packed: Packed

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        weight = self.weight
        if not _packs(x, weight):
            return F.linear(x, weight, self.bias)
        packed = self.packed.of(weight, transposed=False)
        return torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, "none", [], "")


class PackedConv1D(Conv1D):
    """The same for GPT-2's linear layers, whose weight is (in, out)."""

    packed: Packed

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        weight = self.weight
        if not _packs(x, weight):
            return super().forward(x)
        packed = self.packed.of(weight, transposed=True)
        return torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, "none", [], "")


PACKED_CLASS = {nn.Linear: PackedLinear, Conv1D: PackedConv1D}


def pack_linears(model: nn.Module) -> nn.Module:
    """Let the model's linear layers, in place, decode from packed weights on a CPU. Returns the model.

    Each packs itself in its first forward. Nothing happens on other devices, in dtypes or builds without the kernels,
    or for a model whose weights take more than `LARGEST_BYTES`.
    """
    parameters = list(model.parameters())
    if not all(p.device.type == "cpu" for p in parameters) or sum(p.nbytes for p in parameters) > LARGEST_BYTES:
        return model
    for module in model.modules():
        packed_class = PACKED_CLASS.get(type(module))
        if packed_class is not None and can_pack(module.weight.dtype):
            module.__class__ = packed_class
            module.packed = Packed()
    return model


def unpack_linears(model: nn.Module) -> nn.Module:
    """The reverse of `pack_linears`, in place."""
    for module in model.modules():
        for plain_class, packed_class in PACKED_CLASS.items():
            if type(module) is packed_class:
                module.__class__ = plain_class
                del module.packed
    return model


@lru_cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the kernels (torch.compile's own, `torch.ops.mkldnn`), and they agree."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    with torch.no_grad():
        weight = torch.linspace(-1, 1, 32 * 16, dtype=dtype).view(32, 16)
        x = torch.linspace(1, -2, 3 * 16, dtype=dtype).view(3, 16)
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        except (AttributeError, RuntimeError):
            return False
        return torch.allclose(product, F.linear(x, weight), rtol=1e-2, atol=1e-2)
