"""Packed linear layers: the plain product, whatever happened to the weights in between."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from models import packed_linear
from models.packed_linear import PackedConv1D, PackedLinear, can_pack, pack_linears, unpack_linears
from models.tiny import random_model

DTYPES = [torch.float32, torch.bfloat16]
needs_kernels = pytest.mark.skipif(not can_pack(torch.float32), reason="this build of torch has no packed kernels")


def layer(kind: type, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Linear(48, 80) if kind is nn.Linear else Conv1D(80, 48)
    nn.init.normal_(module.bias)
    return module.to(dtype).requires_grad_(False)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2e-2
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@needs_kernels
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(48,), (1, 48), (1, 1, 48), (2, 17, 48), (0, 48)])
def test_product_is_the_plain_one(kind, dtype, shape):
    plain = layer(kind, dtype)
    packed = pack_linears(copy.deepcopy(plain))
    assert type(packed) in (PackedLinear, PackedConv1D)
    x = torch.randn(shape, dtype=dtype)
    assert_same(packed(x), plain(x))
    assert packed.packed.weight is not None  # by the packed kernel
    assert list(packed.state_dict()) == list(plain.state_dict())
    transposed = torch.randn(48, 5, dtype=dtype).t()
    assert_same(packed(transposed), plain(transposed.contiguous()))
    unpacked = unpack_linears(packed)
    assert type(unpacked) is kind and vars(unpacked).keys() == vars(plain).keys()


@needs_kernels
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_change_of_the_weights_is_seen(kind):
    plain, packed = layer(kind, torch.float32), pack_linears(layer(kind, torch.float32))
    x = torch.randn(3, 48)
    assert_same(packed(x), plain(x))
    for module in (plain, packed):
        module.weight.mul_(2)  # in place
    assert_same(packed(x), plain(x))
    for module in (plain, packed):
        module.load_state_dict({key: value + 1 for key, value in module.state_dict().items()})
    assert_same(packed(x), plain(x))
    for module in (plain, packed):
        module.weight.data = module.weight.data.flip(0)  # other storage
    assert_same(packed(x), plain(x))
    assert_same(packed.bfloat16()(x.bfloat16()), plain.bfloat16()(x.bfloat16()))


@needs_kernels
def test_copies_and_pickles_pack_for_themselves():
    packed = pack_linears(layer(nn.Linear, torch.float32))
    x = torch.randn(3, 48)
    expected = packed(x)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert other.packed.weight is None
        assert_same(other(x), expected)


@needs_kernels
def test_gradients_take_the_plain_product():
    packed = pack_linears(layer(nn.Linear, torch.float32))
    x = torch.randn(3, 48, requires_grad=True)
    packed(x).sum().backward()
    assert_same(x.grad, packed.weight.sum(0).expand(3, 48))
    packed.weight.requires_grad_(True)
    packed(x.detach()).sum().backward()
    assert packed.weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert packed(x).dtype == torch.bfloat16


@needs_kernels
@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
def test_a_whole_model_says_the_same_and_keeps_its_weights(shape):
    model = random_model(shape, dtype=torch.float32).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected, before = model(input_ids=ids).logits, copy.deepcopy(model.state_dict())
        assert_same(pack_linears(model)(input_ids=ids).logits, expected)
    assert any(isinstance(m, PackedLinear | PackedConv1D) and m.packed.weight is not None for m in model.modules())
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_large_models_and_builds_without_kernels_stay_plain(monkeypatch):
    monkeypatch.setattr(packed_linear, "LARGEST_BYTES", 100)
    assert type(pack_linears(layer(nn.Linear, torch.float32))) is nn.Linear
    monkeypatch.undo()
    assert not can_pack(torch.float64) and type(pack_linears(layer(nn.Linear, torch.float64))) is nn.Linear
    monkeypatch.setattr(packed_linear, "can_pack", lambda dtype: False)
    packed = pack_linears(layer(nn.Linear, torch.float32))
    assert type(packed) is nn.Linear and packed(torch.ones(1, 48)).shape == (1, 80)
