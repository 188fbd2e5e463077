"""Cached equals uncached, also behind a rollback; rotary and learned positions, views and static buffers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, MambaConfig, MistralConfig

from models.errors import UserError
from models.kv_cache import RollbackCache, forward_with_cache
from models.tiny import random_model


def _cache(model, *, static):
    if not static:
        return RollbackCache.for_model(model, 40)
    return RollbackCache(model.config.num_hidden_layers, 64, static=True)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
@torch.inference_mode()
def test_cached_equals_uncached_after_every_rollback(shape, static):
    model = random_model(shape)
    ids = torch.randint(259, (1, 30))
    expected = model(ids).logits
    cache = _cache(model, static=static)
    first = forward_with_cache(model, ids[:, :10], cache).logits
    torch.testing.assert_close(first, expected[:, :10], atol=1e-4, rtol=1e-4)
    for num_rejected in range(6):  # 0 is a no-op
        length = cache.length
        block = ids[:, length : length + 6].clone()
        block[:, 6 - num_rejected :] = 7  # rejected tokens
        forward_with_cache(model, block, cache)
        cache.rollback(length + 6 - num_rejected)
        assert cache.length == cache.get_seq_length() == length + 6 - num_rejected
        block = ids[:, cache.length : cache.length + 3]
        logits = forward_with_cache(model, block, cache, logits_to_keep=2).logits
        torch.testing.assert_close(logits, expected[:, cache.length - 2 : cache.length], atol=1e-4, rtol=1e-4)
        cache.rollback(length + 2)


@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
@torch.inference_mode()
def test_one_by_one_equals_at_once(shape):
    """Positions do not start from zero again when a cache is used."""
    model = random_model(shape)
    ids = torch.randint(259, (1, 10))
    cache = RollbackCache.for_model(model, 10)
    steps = [forward_with_cache(model, ids[:, i : i + 1], cache).logits for i in range(10)]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_sliding_window_survives_a_rollback():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        MistralConfig(
            vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=4, bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    ids = torch.randint(50, (1, 16))
    expected = model(ids).logits
    cache = RollbackCache.for_model(model, 20)
    forward_with_cache(model, ids[:, :10], cache)
    forward_with_cache(model, torch.zeros(1, 4, dtype=torch.long), cache)
    cache.rollback(10)
    logits = forward_with_cache(model, ids[:, 10:], cache).logits
    torch.testing.assert_close(logits, expected[:, 10:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("alibi", [False, True])
@torch.inference_mode()
def test_a_model_that_asks_for_sdpa_by_name_keeps_it(alibi):
    """Falcon has no attention interface: under another name it would add our mask of bools to its scores."""
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, alibi=alibi, bos_token_id=1,
        eos_token_id=2, new_decoder_architecture=False, multi_query=True, initializer_range=0.5,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(50, (1, 16))
    expected = model(ids).logits
    cache = RollbackCache.for_model(model, 20)
    first = forward_with_cache(model, ids[:, :10], cache).logits
    forward_with_cache(model, torch.zeros(1, 4, dtype=torch.long), cache)
    cache.rollback(10)
    logits = forward_with_cache(model, ids[:, 10:], cache).logits
    torch.testing.assert_close(torch.cat((first, logits), 1), expected, atol=1e-4, rtol=1e-4)
    assert cache.own_mask != alibi


@pytest.mark.parametrize("static", [False, True])
@torch.inference_mode()
def test_gather_keeps_an_accepted_path(static):
    """A tree of two branches behind the prompt; the second is kept."""
    model = random_model("tiny_llama")
    prompt, chosen = torch.randint(259, (1, 8)), torch.randint(259, (1, 2))
    cache = _cache(model, static=static)
    forward_with_cache(model, prompt, cache)
    nodes = torch.cat((torch.tensor([[5, 6]]), chosen), 1)  # (1, 4): branch a, branch b
    size = cache.capacity if static else 12
    mask = torch.zeros(1, 1, 4, size, dtype=torch.bool)
    mask[..., :8] = True
    mask[0, 0, :2, 8:10] = mask[0, 0, 2:, 10:12] = torch.tensor([[True, False], [True, True]])
    forward_with_cache(model, nodes, cache, position_ids=torch.tensor([[8, 9, 8, 9]]), attention_mask=mask)
    cache.gather(8, torch.tensor([10, 11]))
    assert cache.length == 10
    logits = forward_with_cache(model, torch.tensor([[9]]), cache).logits
    expected = model(torch.cat((prompt, chosen, torch.tensor([[9]])), 1)).logits[:, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_states_that_cannot_be_rolled_back_are_refused():
    model = AutoModelForCausalLM.from_config(
        MambaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, state_size=4)
    )
    with pytest.raises(UserError, match="MambaForCausalLM"):
        RollbackCache.for_model(model, 8)
