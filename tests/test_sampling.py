"""Token filters against the numpy reference, sampling, plain generation."""

import numpy as np
import pytest
import torch

from eval.reference import reference_probs
from models.errors import UserError
from models.sampling import SamplingParams, filtered_probs, generate, sample
from models.tiny import random_model

FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_equal_the_reference(filters):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(1)) * 3
    probs = filtered_probs(logits, SamplingParams.of(**filters))
    expected = np.stack([reference_probs(row, **filters) for row in logits.double().numpy()])
    np.testing.assert_allclose(probs.numpy(), expected, atol=2e-6)
    assert ((probs > 0).numpy() == (expected > 0)).all()


def test_filters_by_hand():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    kept = {
        "top_k": (2, [2 / 3, 1 / 3, 0, 0]),
        "top_p": (0.7, [2 / 3, 1 / 3, 0, 0]),
        "min_p": (0.3, [2 / 3, 1 / 3, 0, 0]),
    }
    for name, (value, expected) in kept.items():
        probs = filtered_probs(logits, SamplingParams(temperature=1.0, **{name: value}))
        torch.testing.assert_close(probs, torch.tensor(expected), msg=name)
    ties = filtered_probs(logits, SamplingParams(temperature=1.0, top_k=3))  # both of the tied third place stay
    torch.testing.assert_close(ties, logits.exp())


def test_nucleus_of_a_large_flat_vocabulary():
    logits = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0)) * 0.5
    logits[0, 7] = 50.0  # one row peaked, the other flat
    probs = filtered_probs(logits, SamplingParams(temperature=1.0, top_p=0.95))
    assert probs[0].count_nonzero() == 1
    expected = reference_probs(logits[1].double().numpy(), top_p=0.95)
    assert abs(int(probs[1].count_nonzero()) - np.count_nonzero(expected)) <= 2  # fp32 sums at the boundary
    assert np.count_nonzero(expected) > 8192


@pytest.mark.parametrize(
    ("filters", "named"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 1.0}, "min_p=1.0"),
        ({"typical_p": 0.5}, "typical_p=0.5: unsupported"),
    ],
)
def test_bad_filters_are_named(filters, named):
    with pytest.raises(UserError, match=named):
        SamplingParams.of(**filters)


def test_sample_follows_the_weights_and_never_draws_zero():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    drawn = sample(weights.expand(200_000, -1), torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn, minlength=5)
    assert counts[[0, 2, 4]].sum() == 0
    assert abs(counts[1].item() / 200_000 - 0.75) < 0.004  # 4 standard errors
    tiny = torch.zeros(1000)
    tiny[500] = 1e-30
    assert sample(tiny) == 500


def test_no_padded_id_is_ever_drawn():
    """A head padded from 50 to 64 ids with the best logits on the pads: 10,000 draws stay below 50."""
    logits = torch.zeros(64)
    logits[50:] = 5.0
    probs = filtered_probs(logits[:50].expand(10_000, -1), SamplingParams(temperature=1.0))
    assert int(sample(probs).max()) < 50


@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
def test_batched_generation_equals_single(shape):
    """Left padding shifts neither positions nor attention."""
    model = random_model(shape)
    prompts = [list(range(40, 40 + length)) for length in (3, 17, 9)]
    params = SamplingParams()
    batched = generate(model, prompts, params, max_new_tokens=12)
    for prompt, row in zip(prompts, batched):
        assert generate(model, [prompt], params, max_new_tokens=12)[0] == row
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
        assert theirs[0, len(prompt) :].tolist() == row


def test_generation_stops_behind_eos_and_cuts_the_vocabulary():
    model = random_model("tiny_llama")
    prompt = list(range(40, 50))
    free = generate(model, [prompt], SamplingParams(), max_new_tokens=12)[0]
    ended = generate(model, [prompt, prompt], SamplingParams(), max_new_tokens=12, eos_token_ids=(free[4],))
    expected = free[: free.index(free[4]) + 1]
    assert ended == [expected, expected]
    sampled = generate(model, [prompt] * 8, SamplingParams(2.0), max_new_tokens=12, vocab_size=100)
    assert max(max(row) for row in sampled) < 100
