"""The decode loop: exactness through the real thing, oracles (draft = target, plain = speculative, cached = uncached),
and its ends (EOS, length, positions)."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from eval.drafters import Clock, DraftModelChain, check_ragged
from eval.loop import speculative_decode
from eval.tree import Tree, TreeShape
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target
from models.tiny import byte_tokenizer, random_model
from tests.exact_loop import VOCAB, exact_probs, loop_counts, second_order_pair
from tests.test_verification import chi_square_p_value


def first_blocks(model, num_blocks):
    """A draft that is sometimes right: the target without its last blocks."""
    draft = copy.deepcopy(model)
    draft.model.layers = draft.model.layers[:num_blocks]
    draft.config.num_hidden_layers = num_blocks
    return draft


@pytest.fixture(scope="module")
def target():
    return random_model("tiny_llama")


@pytest.fixture(scope="module")
def draft(target):
    return first_blocks(target, 7)


def prompts(count, length=12, seed=0):
    return torch.randint(256, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


# --- oracles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_len", [1, 4])
def test_greedy_equals_plain_greedy(target, draft, draft_len):
    alphas = []
    for prompt in prompts(8):
        theirs = target.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None)
        options = {"max_new_tokens": 32, "eos_token_ids": (), "draft_len": draft_len}
        plain = speculative_decode(target, None, prompt, **options)
        ours = speculative_decode(target, draft, prompt, **options)
        assert ours.token_ids == plain.token_ids == theirs[0, len(prompt) :].tolist()
        assert plain.tau == 1 and plain.fallback_steps == 0
        alphas.append(ours.alpha)
    assert 0.05 < np.mean(alphas) < 0.95  # acceptances are mixed, or the test shows little


@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}])
def test_a_draft_equal_to_the_target_is_accepted_in_every_round(shape, options):
    model = random_model(shape)
    result = speculative_decode(
        model, model, prompts(1)[0], max_new_tokens=101, draft_len=4, eos_token_ids=(), **options
    )
    assert [r.accepted for r in result.rounds] == [4] * 20 and result.alpha == 1 and result.tau == 5
    assert len(result.token_ids) == 101 and sum(result.is_accepted) == 80


def test_a_draft_that_is_never_right(target):
    class Wrong(DraftModelChain):
        def propose(self, sequence, depth):
            plain = speculative_decode(target, None, sequence, max_new_tokens=depth, eos_token_ids=())
            return Tree.chain((torch.tensor(plain.token_ids) + 1) % 256)

    wrong = Wrong(target, vocab_size=259, params=SamplingParams())
    result = speculative_decode(target, wrong, prompts(1)[0], max_new_tokens=20, eos_token_ids=())
    assert result.alpha == 0 and result.tau == 1
    assert all((r.drafted, r.depth, r.judged, r.accepted) == (4, 4, 1, 0) for r in result.rounds)


@pytest.mark.parametrize("draft_shape", ["tiny_llama", "tiny_gpt2"])
def test_cached_draft_equals_uncached_in_every_round(target, draft, draft_shape):
    """The draft's cache lacks nothing and holds no rejected token, whatever was accepted."""
    model = draft if draft_shape == "tiny_llama" else random_model("tiny_gpt2")

    accepted_counts = []

    class Recorded(DraftModelChain):
        def propose(self, sequence, depth):
            tree = super().propose(sequence, depth)
            ids = torch.cat((sequence, tree.tokens))[None]
            logits = self.model(ids).logits[0, len(sequence) - 1 : -1]
            torch.testing.assert_close(tree.probs, logits.softmax(-1), atol=1e-4, rtol=1e-3)
            return tree

        def accept(self, path, next_token, features):
            super().accept(path, next_token, features)
            accepted_counts.append(len(path))

    recorded = Recorded(model, vocab_size=259, params=SamplingParams(1.0))
    for seed, prompt in enumerate(prompts(4)):
        speculative_decode(
            target, recorded, prompt, temperature=1.0, max_new_tokens=40, draft_len=3, eos_token_ids=(), seed=seed
        )
    if draft_shape == "tiny_llama":
        assert set(accepted_counts) == {0, 1, 2, 3}


def test_order_of_prompts_changes_nothing(target, draft):
    """No state survives a call: the same prompts in reverse order give the same texts and counts."""
    options = {"temperature": 1.0, "max_new_tokens": 24, "eos_token_ids": ()}
    tasks = list(enumerate(prompts(6)))
    forward = {i: speculative_decode(target, draft, p, seed=i, **options) for i, p in tasks}
    backward = {i: speculative_decode(target, draft, p, seed=i, **options) for i, p in reversed(tasks)}
    for i, result in forward.items():
        assert result.token_ids == backward[i].token_ids and result.rounds == backward[i].rounds


# --- exactness through the loop --------------------------------------------------------------------------------------


LOOP_CASES = [
    ({"temperature": 0.7}, "probabilistic"),
    ({"temperature": 1.0, "top_k": 3}, "probabilistic"),
    ({"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}, "probabilistic"),
    ({"temperature": 1.0}, "greedy"),
]


@pytest.mark.parametrize(("filters", "draft_sampling"), LOOP_CASES)
def test_the_loop_is_exact(filters, draft_sampling):
    target, draft = second_order_pair()
    params = SamplingParams(**filters)
    drafter = DraftModelChain(draft, vocab_size=VOCAB, params=params, draft_sampling=draft_sampling)
    num_draws = 20_000 if filters["temperature"] == 0.7 else 8_000
    counts = loop_counts(target, drafter, TreeShape.chain(2), params, num_draws, num_tokens=3)
    assert chi_square_p_value(counts, exact_probs(target, filters, num_tokens=3)) > 0.01 / len(LOOP_CASES)


def test_the_loop_with_a_wrong_declared_proposal_is_not():
    """Negative control: an argmax draft that declares its softmax."""

    class Wrong(DraftModelChain):
        def propose(self, sequence, depth):
            self.is_one_hot = True
            tokens = super().propose(sequence, depth).tokens
            before = torch.stack((sequence[-1], tokens[0]))
            return Tree.chain(tokens, self.model.table[torch.stack((sequence[-2], sequence[-1])), before].softmax(-1))

    target, draft = second_order_pair()
    params = SamplingParams(1.0)
    drafter = Wrong(draft, vocab_size=VOCAB, params=params)
    counts = loop_counts(target, drafter, TreeShape.chain(2), params, 2_000, num_tokens=3)
    assert chi_square_p_value(counts, exact_probs(target, {"temperature": 1.0}, num_tokens=3)) < 1e-6


# --- ends ------------------------------------------------------------------------------------------------------------


def test_eos_inside_a_block_ends_the_text(target):
    """draft = target, K = 5, EOS third in the block: 3 tokens committed, 3 counted; uncut counts beside."""
    for prompt in prompts(20):
        free = speculative_decode(target, None, prompt, max_new_tokens=12, eos_token_ids=()).token_ids
        eos = free[3]
        if eos not in free[:3]:
            break
    assert eos not in free[:3]
    for ends in ((eos,), (258, eos)):
        result = speculative_decode(target, target, prompt, draft_len=5, eos_token_ids=ends)
        assert result.token_ids == free[:4] and result.finish_reason == "eos"
        (only,) = result.rounds
        assert (only.drafted, only.judged, only.accepted, only.accepted_uncut) == (5, 3, 3, 5)
        assert result.tau == 3 and result.alpha == 1
    first = speculative_decode(target, target, prompt, eos_token_ids=(free[0],))
    assert first.token_ids == free[:1] and first.rounds == []


def test_a_drafted_eos_that_is_rejected_ends_nothing(target):
    class AlwaysEnds(DraftModelChain):
        def propose(self, sequence, depth):
            return Tree.chain(torch.full((depth,), 258))

    prompt = prompts(1)[0]
    plain = speculative_decode(target, None, prompt, max_new_tokens=20)
    assert 258 not in plain.token_ids
    drafter = AlwaysEnds(target, vocab_size=259, params=SamplingParams())
    assert speculative_decode(target, drafter, prompt, max_new_tokens=20).token_ids == plain.token_ids


def test_max_new_tokens_inside_a_block_is_never_exceeded(target, draft):
    for max_new_tokens in range(1, 9):
        for model in (target, draft):
            result = speculative_decode(
                target, model, prompts(1)[0], max_new_tokens=max_new_tokens, draft_len=5, eos_token_ids=()
            )
            assert len(result.token_ids) == len(result.is_accepted) == max_new_tokens
            assert result.finish_reason == "length"
    two = speculative_decode(target, target, prompts(1)[0], max_new_tokens=3, draft_len=5, eos_token_ids=())
    assert two.rounds[0].judged == two.rounds[0].accepted == 2 and two.rounds[0].accepted_uncut == 5


def gpt2(num_positions, seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=num_positions,
                        bos_token_id=1, eos_token_id=2, initializer_range=0.5)  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("draft_positions", [32, 64, 128])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_positions_run_out(draft_positions, temperature):
    """Look-ahead shrinks at the target's limit and falls back to plain steps behind the draft's."""
    target, draft = gpt2(64), gpt2(draft_positions, seed=draft_positions)
    options = {"max_new_tokens": 20, "eos_token_ids": (), "temperature": temperature}
    for length in (20, 30, 31, 32, 33, 62, 63, 64):
        prompt = torch.randint(50, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        result = speculative_decode(target, draft, prompt, **options)
        # the target reads 64 tokens; the one it then emits is never read
        assert len(result.token_ids) == min(20, 65 - length)
        assert result.finish_reason == ("length" if length <= 45 else "positions")
        uncut = 1 + sum(r.accepted_uncut + 1 for r in result.rounds)
        assert uncut - 5 < len(result.token_ids) <= uncut  # only the last round is ever cut
        if temperature == 0:
            assert result.token_ids == speculative_decode(target, None, prompt, **options).token_ids
        if draft_positions == 32 and length > 32:
            assert result.fallback_steps == len(result.rounds) and np.isnan(result.alpha)
        if draft_positions == 128 and length < 40:
            assert result.fallback_steps == 0
    with pytest.raises(UserError, match="prompt of 65 tokens"):
        speculative_decode(target, draft, [3] * 65, **options)
    with pytest.raises(UserError, match="prompt of 0 tokens"):
        speculative_decode(target, draft, [], **options)


@pytest.mark.parametrize("method", ["chain_k4", "static_2x2x1x1"])
def test_no_block_stands_on_both_sides_of_longropes_switch(method):
    """Beyond it all tokens of a forward take other rotations: a drafted block would change the logits before it."""
    config = random_model("tiny_llama").config
    width = config.hidden_size // config.num_attention_heads // 2
    config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
        "short_factor": [1.0] * width, "long_factor": [9.0] * width, "factor": 4.0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # logits that the rotations change
    options = {"max_new_tokens": 32, "eos_token_ids": ()}
    for prompt in prompts(4):
        plain = speculative_decode(model, None, prompt, **options)
        ours = speculative_decode(model, model, prompt, method=method, **options)
        assert ours.token_ids == plain.token_ids
        assert ours.fallback_steps <= 1 and ours.tau > 1.5  # drafts on both sides
    with pytest.raises(UserError, match=r"failure\.parts=.*longrope"):
        check_ragged([model], setting="failure.parts=['batch']")


# --- vocabularies and options ----------------------------------------------------------------------------------------


def _padded(width):
    """tiny_llama with `width` ids, of which the byte tokenizer knows 259; pads would win every argmax."""
    model = random_model("tiny_llama")
    model.resize_token_embeddings(width, mean_resizing=False)
    model.get_output_embeddings().weight.data[259:] = 3 * model.get_output_embeddings().weight.data[65]
    return model


def test_padded_ids_are_never_proposed_nor_emitted():
    target = Target(_padded(320), byte_tokenizer(), name="padded")
    for draft in (_padded(288), _padded(384)):
        for temperature in (0.0, 1.5):
            result = speculative_decode(
                target, draft, prompts(1)[0], temperature=temperature, max_new_tokens=60, eos_token_ids=()
            )
            assert max(result.token_ids) < 259
            assert result.alpha > 0.99 or temperature > 0


def test_a_narrower_draft_is_refused_or_falls_back(target):
    narrow = gpt2(64)
    with pytest.raises(UserError, match="draft with 50 ids for a target with 259"):
        speculative_decode(Target(target, byte_tokenizer(), name="tiny"), narrow, prompts(1)[0])
    # bare models do not tell which ids are padding: exact all the same
    options = {"max_new_tokens": 12, "eos_token_ids": ()}
    prompt = [i % 50 for i in prompts(1)[0]]
    result = speculative_decode(target, narrow, prompt, **options)
    assert result.token_ids == speculative_decode(target, None, prompt, **options).token_ids
    sampled = speculative_decode(target, narrow, prompt, temperature=1.0, **options)
    assert len(sampled.token_ids) == 12


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"typical_p": 0.9}, "typical_p=0.9: unsupported"),
        ({"draft_sampling": "soft"}, "draft_sampling=soft"),
        ({"draft_len": 0}, "draft_len=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"top_p": 0}, "top_p=0"),
    ],
)
def test_bad_options_are_named(target, options, named):
    with pytest.raises(UserError, match=named):
        speculative_decode(target, target, [1, 2], **options)


def test_times_add_up(target, draft):
    result = speculative_decode(target, draft, prompts(1)[0], max_new_tokens=20, eos_token_ids=())
    assert 0 < result.draft_forward_s < result.draft_s
    assert 0 <= result.overhead_s < result.wall_s
    clock = Clock(torch.device("cpu"))
    clock.add("a", clock.now() - 1)
    assert 1 <= clock.seconds["a"] < 2


# --- the real target -------------------------------------------------------------------------------------------------


def chat_prompts(tokenizer, count):
    topics = ["rivers", "bread", "the number 12", "trains", "sorting a list", "Rome", "bees", "chess", "rain", "songs"]
    asks = ["Tell me about {}.", "Write a poem on {}.", "What is special about {}?", "List facts on {}.", "Why {}?"]
    for i in range(count):
        ask = asks[i // len(topics) % len(asks)].format(topics[i % len(topics)])
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": ask}], add_generation_prompt=True, tokenize=False
        )
        yield tokenizer(text, add_special_tokens=False)["input_ids"]


def _greedy_on_the_real_target(smollm2, num_prompts, max_new_tokens):
    draft = first_blocks(smollm2.model, 29)
    results = []
    for prompt in chat_prompts(smollm2.tokenizer, num_prompts):
        plain = speculative_decode(smollm2, None, prompt, max_new_tokens=max_new_tokens)
        ours = speculative_decode(smollm2, draft, prompt, max_new_tokens=max_new_tokens)
        assert ours.token_ids == plain.token_ids, prompt
        results.append(ours)
    judged = sum(r.judged for result in results for r in result.rounds)
    accepted = sum(r.accepted for result in results for r in result.rounds)
    assert 0.05 < accepted / judged < 0.98


@pytest.mark.slow
def test_greedy_equals_plain_greedy_on_the_real_target(smollm2):
    _greedy_on_the_real_target(smollm2, num_prompts=8, max_new_tokens=32)


@pytest.mark.long
def test_greedy_equals_plain_greedy_on_the_real_target_at_length(smollm2):
    _greedy_on_the_real_target(smollm2, num_prompts=50, max_new_tokens=64)
