"""Answers in a batch that is kept full: company, order and padding change no row; draws follow the distribution."""

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, MistralConfig

from models.generation import Request, generate_rows
from models.kv_cache import RollbackCache
from models.sampling import SamplingParams, filtered_probs, generate, sample, sample_at
from models.tiny import random_model

ENDS = (258, 7, 30)  # random models seldom draw one id: three end more rows early


def requests(num_rows: int = 14) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 60, (num_rows,), generator=generator).tolist()
    prompts = [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]
    return [Request(i, prompt, 20 + i % 7, seed=(5, i)) for i, prompt in enumerate(prompts)]


def answers(model, waiting, params, batch_size):
    found = list(generate_rows(model, waiting, params, batch_size=batch_size, eos_token_ids=ENDS, vocab_size=259))
    assert not waiting
    return {answer.key: answer for answer in found}


def sliding_window_model():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=259, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "make", [lambda: random_model("tiny_llama"), lambda: random_model("tiny_gpt2"), sliding_window_model]
)
def test_greedy_rows_equal_plain_generation(make):
    model = make()
    rows = answers(model, requests(), SamplingParams(), 8)
    for request in requests():
        [plain] = generate(
            model, [request.prompt_ids], SamplingParams(), max_new_tokens=request.max_new_tokens, eos_token_ids=ENDS
        )
        assert rows[request.key].token_ids == plain
        assert rows[request.key].finish_reason == ("stop" if plain[-1] in ENDS else "length")
    assert {row.finish_reason for row in rows.values()} == {"stop", "length"} or make is sliding_window_model


@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.8, top_k=40, top_p=0.9)])
def test_a_row_depends_on_its_seed_alone(params):
    model = random_model("tiny_llama")
    expected = answers(model, requests(), params, 1)
    for batch_size in (3, 8, 50):
        assert answers(model, requests(), params, batch_size) == expected
    assert answers(model, requests()[::-1], params, 8) == expected
    assert answers(model, requests()[5:9], params, 8) == {key: expected[key] for key in range(5, 9)}


def test_rows_in_static_buffers_equal_rows_in_views(monkeypatch):
    """The shape that caches have on CUDA."""
    model, params = random_model("tiny_llama"), SamplingParams(1.0)
    expected = answers(model, requests(), params, 8)
    layers = model.config.num_hidden_layers
    monkeypatch.setattr(
        RollbackCache, "for_model", lambda model, capacity: RollbackCache(layers, -(-capacity // 64) * 64, static=True)
    )
    assert answers(model, requests(), params, 8) == expected


def test_requests_may_come_while_answers_go():
    model, waiting, seen = random_model("tiny_llama"), requests()[:4], []
    for answer in generate_rows(model, waiting, SamplingParams(), batch_size=2, eos_token_ids=ENDS):
        seen.append(answer.key)
        if answer.key < 100:
            waiting.append(Request(answer.key + 100, [40, *answer.token_ids], 3))
    assert sorted(seen) == [0, 1, 2, 3, 100, 101, 102, 103]


def test_ended_rows_leave_the_batch(monkeypatch):
    """One long row beside seven short ones: the later steps carry it alone."""
    import models.generation as generation

    sizes, step = [], generation._step
    monkeypatch.setattr(
        generation, "_step", lambda model, cache, rows, mask: sizes.append(len(rows)) or step(model, cache, rows, mask)
    )
    waiting = [Request(i, [40 + i, 41], 30 if i == 0 else 2 + i) for i in range(8)]
    list(generate_rows(random_model("tiny_llama"), waiting, SamplingParams(), batch_size=8))
    assert len(sizes) == 30 and sizes[0] == 8 and sizes[10:] == [1] * 20


@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(1.3, top_p=0.8)])
def test_first_tokens_follow_the_exact_distribution(params):
    model, prompt = random_model("tiny_llama"), list(range(60, 72))
    num_seeds = 4000
    waiting = [Request(seed, prompt, 1, seed=(seed, 0)) for seed in range(num_seeds)]
    drawn = [row.token_ids[0] for row in generate_rows(model, waiting, params, batch_size=250)]
    with torch.inference_mode():
        probs = filtered_probs(model(torch.tensor([prompt])).logits[0, -1], params).double()  # (V,)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    is_common = probs * num_seeds >= 5
    expected = torch.cat([probs[is_common], probs[~is_common].sum()[None]]) * num_seeds
    observed = torch.cat([counts[is_common], counts[~is_common].sum()[None]])
    kept = expected > 0
    assert int(kept.sum()) >= 10
    assert chisquare(observed[kept], expected[kept] / expected[kept].sum() * num_seeds).pvalue > 0.001


def test_sample_at_is_sample_with_the_numbers_given():
    weights = torch.rand(50, 30)
    uniform = torch.rand((50, 1), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sample_at(weights, uniform), sample(weights, torch.Generator().manual_seed(3)))
    edges = torch.tensor([[0.0], [0.25 - 1e-9], [0.25 + 1e-9], [1 - 2**-53]], dtype=torch.float64)
    assert sample_at(torch.tensor([0.0, 1.0, 3.0, 0.0]).expand(4, -1), edges).tolist() == [1, 1, 2, 2]
