"""Batches of ragged rows: each row is the text of batch 1, whatever its company; caches; ends; exact sampling."""

import copy

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from eval.batched import speculative_decode_batch
from eval.loop import speculative_decode
from eval.reference import joint_probs, reference_probs
from models.eagle import build_eagle
from models.errors import UserError
from models.kv_cache import RollbackCache, forward_with_cache
from models.medusa import build_medusa
from models.ragged_cache import RaggedCache
from models.target import Target
from models.tiny import byte_tokenizer, random_model
from tests.test_loop import first_blocks
from tests.test_verification import chi_square_p_value

LENGTHS = (12, 1, 21, 5, 8)


@pytest.fixture(scope="module")
def llama():
    return Target(random_model("tiny_llama"), byte_tokenizer(), name="tiny_llama", tap_ids="default")


@pytest.fixture(scope="module")
def gpt2():
    return Target(random_model("tiny_gpt2"), byte_tokenizer(), name="tiny_gpt2", tap_ids=[0, 1, 2])


def ragged_prompts(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]


def make_draft(kind, target):
    """Drafts that are sometimes right: the target's first blocks, or heads whose fc and vocabulary come from it."""
    if kind is None:
        return None
    if kind == "model":
        return first_blocks(target.model, 7) if hasattr(target.model, "model") else random_model("tiny_gpt2", seed=1)
    if kind == "medusa":
        return build_medusa(target=target, num_heads=3, draft_vocab_size=200).eval()
    draft_vocab_size = 200 if kind == "eagle3" else None
    return build_eagle(target=target, kind=kind, draft_vocab_size=draft_vocab_size, seed=3).eval()


def one_by_one(target, draft, prompts, seeds=None, **options):
    """Batch 1, by the loop of its own."""
    seeds = seeds or range(len(prompts))
    return [speculative_decode(target, draft, p, seed=seed, **options) for p, seed in zip(prompts, seeds)]


def assert_equal(batch, singles, *, with_rounds=True):
    assert len(batch.results) == len(singles)
    for ours, theirs in zip(batch.results, singles):
        assert ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
        if with_rounds:
            assert ours.rounds == theirs.rounds and ours.token_depth == theirs.token_depth
            assert ours.fallback_steps == theirs.fallback_steps


# --- rows of a batch = batch 1 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40}])
@pytest.mark.parametrize("kind", [None, "model", "eagle1", "eagle3", "medusa"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rows_of_a_batch_are_the_texts_of_batch_1(name, kind, options, request):
    """Greedy and, by the rows' own seeds, sampled; with the same rounds."""
    target = request.getfixturevalue(name)
    draft, prompts = make_draft(kind, target), ragged_prompts()
    options = {**options, "max_new_tokens": 20, "draft_len": 3, "eos_token_ids": ()}
    seeds = [11, 5, 7, 5, 3]
    batch = speculative_decode_batch(target, draft, prompts, seeds=seeds, **options)
    singles = one_by_one(target, draft, prompts, seeds, **options)
    assert_equal(batch, singles)
    accepted = [r.accepted for result in batch.results for r in result.rounds]
    if kind == "model" and name == "llama":
        assert {0, 1, 2, 3} == set(accepted)  # rows part in length, or the test shows little
    assert batch.num_tokens == 20 * len(prompts)
    assert batch.num_rounds == max(len(result.rounds) for result in batch.results)
    assert batch.wall_s >= batch.prefill_s + batch.target_s + batch.draft_s > 0
    assert all(0 < result.wall_s <= batch.wall_s for result in batch.results)


def test_one_hot_drafts_above_temperature_0(llama):
    options = {"temperature": 1.0, "draft_sampling": "greedy", "max_new_tokens": 16, "eos_token_ids": ()}
    for kind in ("model", "eagle3"):
        draft, prompts = make_draft(kind, llama), ragged_prompts()
        assert_equal(
            speculative_decode_batch(llama, draft, prompts, **options), one_by_one(llama, draft, prompts, **options)
        )


def test_order_and_company_change_nothing(llama):
    draft, prompts = make_draft("model", llama), ragged_prompts()
    options = {"temperature": 1.0, "max_new_tokens": 20, "eos_token_ids": ()}
    forward = speculative_decode_batch(llama, draft, prompts, seeds=range(5), **options).results
    backward = speculative_decode_batch(llama, draft, prompts[::-1], seeds=range(5)[::-1], **options).results
    pair = speculative_decode_batch(llama, draft, prompts[2:4], seeds=[2, 3], **options).results
    assert [r.token_ids for r in forward] == [r.token_ids for r in backward[::-1]]
    assert [r.token_ids for r in forward[2:4]] == [r.token_ids for r in pair]
    assert [r.rounds for r in forward[2:4]] == [r.rounds for r in pair]


def test_a_draft_equal_to_the_target_is_accepted_whole(llama):
    batch = speculative_decode_batch(
        llama, llama.model, ragged_prompts(), max_new_tokens=41, draft_len=4, eos_token_ids=(), temperature=1.0
    )
    assert all([r.accepted for r in result.rounds] == [4] * 8 for result in batch.results)
    assert batch.num_rounds == 8


def test_results_stand_in_the_order_of_the_prompts(llama):
    """Rows end at different rounds, so that they are moved; every prompt keeps its own text."""
    prompts = ragged_prompts((3,) * 8)
    options = {"max_new_tokens": 30, "eos_token_ids": ()}
    draft = make_draft("model", llama)
    batch = speculative_decode_batch(llama, draft, prompts, **options)
    assert len({len(result.rounds) for result in batch.results}) > 3
    plain = speculative_decode_batch(llama, None, prompts, **options)
    assert [r.token_ids for r in batch.results] == [r.token_ids for r in plain.results]


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "model", "eagle3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_end_by_an_end_of_text_id(llama, kind, temperature):
    draft, prompts = make_draft(kind, llama), ragged_prompts()
    options = {"temperature": temperature, "max_new_tokens": 40}
    unbounded = speculative_decode_batch(llama, draft, prompts, eos_token_ids=(), **options).results
    ends = [result.token_ids[4 + 3 * i] for i, result in enumerate(unbounded)]  # each row meets one, early or late
    batch = speculative_decode_batch(llama, draft, prompts, eos_token_ids=ends, **options)
    assert_equal(batch, one_by_one(llama, draft, prompts, eos_token_ids=ends, **options))
    assert {"eos"} <= {result.finish_reason for result in batch.results}
    for result in batch.results:
        assert not set(result.token_ids[:-1]) & set(ends)


@pytest.mark.parametrize("kind", [None, "model", "eagle1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_end_at_the_targets_last_position(gpt2, kind, temperature):
    """256 positions: some rows run out of them while others go on; drafts get shorter row by row before."""
    draft, prompts = make_draft(kind, gpt2), ragged_prompts((250, 256, 100, 244, 3))
    options = {"temperature": temperature, "max_new_tokens": 20, "draft_len": 4, "eos_token_ids": ()}
    batch = speculative_decode_batch(gpt2, draft, prompts, **options)
    assert_equal(batch, one_by_one(gpt2, draft, prompts, **options))
    assert [r.finish_reason for r in batch.results] == ["positions", "positions", "length", "positions", "length"]
    assert len(batch.results[1].token_ids) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_fewer_positions_falls_back_row_by_row(llama, temperature):
    draft, prompts = random_model("tiny_gpt2"), ragged_prompts((240, 10, 254, 300))
    options = {"temperature": temperature, "max_new_tokens": 24, "draft_len": 4, "eos_token_ids": ()}
    batch = speculative_decode_batch(llama, draft, prompts, **options)
    assert_equal(batch, one_by_one(llama, draft, prompts, **options))
    fallbacks = [result.fallback_steps for result in batch.results]
    assert fallbacks[0] > 0 and fallbacks[1] == 0 and fallbacks[3] == len(batch.results[3].rounds)


def test_a_draft_that_lacks_ids_leaves_its_rows_plain(llama):
    """Bare draft with fewer embeddings than the target has ids, through the drafter itself: `check_vocabulary` refuses
    it to users of a Target."""
    narrow = random_model("tiny_gpt2")
    narrow.transformer.wte.weight = torch.nn.Parameter(narrow.transformer.wte.weight[:200])
    narrow.lm_head.weight = narrow.transformer.wte.weight
    from eval.batched_drafters import Draws, ModelChains, Rows
    from eval.drafters import Clock
    from models.sampling import SamplingParams

    drafter = ModelChains(narrow, 259, SamplingParams(), True)
    sequences = torch.tensor([[5, 7, 9, 0, 0], [5, 230, 9, 0, 0], [5, 7, 9, 0, 0]])
    clock = Clock(torch.device("cpu"))
    with torch.inference_mode():
        drafter.start(Rows(sequences, [3, 3, 3]), None, capacity=12, clock=clock)
        assert [drafter.max_draft_len(row, 4) > 0 for row in range(3)] == [True, False, True]
        sequences[:, 3] = torch.tensor([11, 12, 240])  # the roots
        chains = drafter.propose(Rows(sequences, [4, 4, 4]), Draws([2, 0, 2], [torch.Generator()] * 3))
    assert [drafter.max_draft_len(row, 4) > 0 for row in range(3)] == [True, False, False]
    wanted = speculative_decode(narrow, None, [5, 7, 9, 11], max_new_tokens=2, eos_token_ids=()).token_ids
    assert chains.tokens[0].tolist() == wanted


def test_a_single_token_is_the_prefills(llama):
    batch = speculative_decode_batch(llama, make_draft("eagle3", llama), ragged_prompts(), max_new_tokens=1)
    assert batch.num_rounds == 0 and all(len(result.token_ids) == 1 for result in batch.results)
    plain = one_by_one(llama, None, ragged_prompts(), max_new_tokens=1)
    assert [r.token_ids for r in batch.results] == [r.token_ids for r in plain]


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
def test_ragged_cache_equals_a_cache_for_each_row(shape):
    """Rows advance by different counts, are rolled back, and one leaves."""
    model = random_model(shape)
    generator = torch.Generator().manual_seed(0)
    ragged = RaggedCache.for_rows(model, 3, 40)
    singles = [RollbackCache.for_model(model, 40) for _ in range(3)]
    with torch.inference_mode():
        for counts in ([5, 2, 7], [1, 3, 2], [4, 4, 1], [1, 1, 1], [2, 1, 3], [3, 1]):
            if len(counts) == 2:
                ragged.drop(0)
                singles = [singles[2], singles[1]]
            tokens = torch.randint(256, (len(counts), max(counts)), generator=generator)
            positions, mask = ragged.place(max(counts), tokens.device)
            logits = forward_with_cache(model, tokens, ragged, position_ids=positions, attention_mask=mask).logits
            ragged.advance(counts)
            for row, count in enumerate(counts):
                alone = forward_with_cache(model, tokens[row : row + 1, :count], singles[row]).logits[0]
                torch.testing.assert_close(logits[row, :count], alone, atol=1e-4, rtol=1e-4)
            assert ragged.lengths == [single.length for single in singles]
            ragged.lengths[1] -= 1
            singles[1].rollback(singles[1].length - 1)


def test_a_full_cache_is_our_own_mistake():
    model = random_model("tiny_gpt2")
    cache = RaggedCache.for_rows(model, 2, 8)
    cache.lengths = [3, 7]
    with pytest.raises(AssertionError, match="9 tokens in a cache of 8"):
        cache.place(2, torch.device("cpu"))


# --- exactness of sampling -------------------------------------------------------------------------------------------


def tiny_gpt2_pair():
    """A target and a draft over 4 ids."""
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=4, n_embd=16, n_layer=1, n_head=2, n_positions=32, initializer_range=0.4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=None,
        )  # fmt: skip
        models.append(GPT2LMHeadModel(config).eval())
    target, draft = models
    with torch.no_grad():  # between another model and the target, so that it is often right
        for parameter, of_target in zip(draft.parameters(), target.parameters()):
            parameter.lerp_(of_target, 0.7)
    return Target(target, byte_tokenizer(), name="tiny"), draft


@pytest.mark.parametrize("draft_sampling", ["probabilistic", "greedy"])
def test_sampled_rows_have_the_exact_joint_distribution(draft_sampling):
    """Two prompts of different lengths in the same batches; three tokens each, two of which come out of rounds."""
    target, draft = tiny_gpt2_pair()
    prompts, filters, num_tokens = [[1, 2], [3, 0, 1, 1, 2]], {"temperature": 1.2}, 3
    counts, accepted, judged = np.zeros((2, *(4,) * num_tokens)), 0, 0
    for batch_number in range(12):
        seeds = range(1000 * batch_number, 1000 * (batch_number + 1))
        batch = speculative_decode_batch(
            target, draft, prompts * 500, max_new_tokens=num_tokens, draft_len=2, eos_token_ids=(),
            draft_sampling=draft_sampling, seeds=seeds, **filters,
        )  # fmt: skip
        for number, result in enumerate(batch.results):
            counts[(number % 2, *result.token_ids)] += 1
            accepted += sum(r.accepted for r in result.rounds)
            judged += sum(r.judged for r in result.rounds)
    assert 0.2 < accepted / judged < 0.95
    for prompt, of_prompt in zip(prompts, counts):

        def probs(prefix, prompt=prompt):
            with torch.no_grad():
                logits = target.model(torch.tensor([[*prompt, *prefix]])).logits[0, -1]
            return reference_probs(logits.numpy(), **filters)

        expected = joint_probs(probs, num_tokens, 4).reshape(-1)
        assert chi_square_p_value(of_prompt.reshape(-1), expected) > 0.01 / 4


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"method": "static_3x2"}, "method=static_3x2: batches decode by chains only"),
        ({"prompts": []}, "0 prompts"),
        ({"prompts": [[1], []]}, "prompt of 0 tokens"),
        ({"prompts": [[1] * 1025]}, "prompt of 1025 tokens"),
        ({"seeds": [1, 2]}, "seeds: 2 for 1 prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"draft_sampling": "best"}, "draft_sampling=best"),
        ({"typical_p": 0.5}, "typical_p=0.5"),
    ],
)
def test_mistakes_are_told(llama, options, told):
    options = {"prompts": [[1, 2]], **options}
    with pytest.raises(UserError, match=told):
        speculative_decode_batch(llama, None, options.pop("prompts"), **options)


def test_more_tokens_than_medusa_heads_are_refused(llama):
    with pytest.raises(UserError, match="4 levels for a draft of 3 Medusa heads"):
        speculative_decode_batch(llama, make_draft("medusa", llama), [[1, 2]], method="chain_k4")


def test_a_sliding_window_is_refused():
    config = MistralConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=8,
    )  # fmt: skip
    target = Target(MistralForCausalLM(config), byte_tokenizer(), name="window")
    with pytest.raises(UserError, match="sliding window"):
        speculative_decode_batch(target, None, [[1, 2]])


def test_a_head_of_other_taps_is_refused(llama):
    other = Target(copy.deepcopy(llama.model), byte_tokenizer(), name="other", tap_ids=[1, 2, 3])
    with pytest.raises(UserError, match="reads the taps"):
        speculative_decode_batch(llama, make_draft("eagle3", other), [[1, 2]])
