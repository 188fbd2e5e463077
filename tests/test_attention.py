"""Attention of decoding steps against torch's own with repeated keys and values, and against transformers' SDPA."""

import pytest
import torch
import torch.nn.functional as F

from models.attention import DECODING, attend, decoding_attention
from models.kv_cache import RollbackCache, forward_with_cache
from models.tiny import random_model


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 7), (1, 1), (5, 5), (4, 9)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (6, 1)])
def test_attend_is_attention_with_repeated_keys(num_heads, num_kv_heads, num_queries, num_keys, with_grad):
    torch.manual_seed(0)
    query = torch.randn(2, num_heads, num_queries, 8, requires_grad=with_grad)
    key, value = (torch.randn(2, num_kv_heads, num_keys, 8) for _ in range(2))
    masks = [torch.rand(rows, 1, num_queries, num_keys) > 0.4 for rows in (1, 2)]
    for mask in masks:
        mask[..., 0] = True
    if num_queries in (1, num_keys):
        masks.append(None)
    repeated = [x.repeat_interleave(num_heads // num_kv_heads, dim=1) for x in (key, value)]
    for mask in masks:
        is_causal = mask is None and num_queries > 1
        expected = F.scaled_dot_product_attention(query, *repeated, attn_mask=mask, is_causal=is_causal, scale=0.3)
        with torch.set_grad_enabled(with_grad):
            out = attend(query, key, value, mask, 0.3)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        if with_grad:
            (grad,) = torch.autograd.grad(out.square().sum(), query)
            (grad_expected,) = torch.autograd.grad(expected.square().sum(), query)
            torch.testing.assert_close(grad, grad_expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
def test_a_model_decodes_as_with_transformers_attention(shape):
    model = random_model(shape, dtype=torch.float32).eval()
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        cache, parts = RollbackCache.for_model(model, 32), []
        for start, end in ((0, 9), (9, 10), (10, 14), (14, 15), (15, 20)):
            parts.append(forward_with_cache(model, ids[:, start:end], cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


def test_the_config_is_as_before_afterwards():
    model = random_model("tiny_llama", dtype=torch.float32)
    with pytest.raises(KeyError), decoding_attention(model):
        assert model.config._attn_implementation == DECODING
        raise KeyError
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "eager"
    with decoding_attention(model):
        assert model.config._attn_implementation == "eager"
