"""Lookahead decoding: the window reads what plain sequences read, the pool keeps its bounds, and no text changes."""

import pytest
import torch

from eval.lookahead import LookaheadDrafter, NgramPool, merge, window_structure
from eval.loop import decode, speculative_decode
from eval.tree import TreeShape
from models.errors import UserError
from models.sampling import SamplingParams
from models.tiny import random_model
from tests.exact_loop import PROMPT, VOCAB, exact_probs, loop_counts, second_order_pair
from tests.test_verification import chi_square_p_value

SHAPE = TreeShape.parse("lookahead_w3_n3_g3")


# --- the window --------------------------------------------------------------------------------------------------


def test_places_and_mask_of_the_figure():
    depth, visible = window_structure(3, 4, torch.device("cpu"))
    assert depth.tolist() == [1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5]
    seen_by_the_last = visible[-1].nonzero().flatten().tolist()
    assert seen_by_the_last == [0, 1, 2, 6, 10]  # row 0, then its column: places 1, 2, 3, 4, 5
    assert visible[7].nonzero().flatten().tolist() == [3, 7]  # column 0: the root stands above it
    assert visible.diagonal().all()


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("method", ["lookahead_w4_n4_g3", "lookahead_w1_n5_g2", "lookahead_w6_n3_g4"])
def test_the_window_reads_what_plain_sequences_read(model, method):
    """Every token of it, in every round: logits behind the text, row 0 up to the column, and the column down to it."""
    target, shape, compared = random_model(model), TreeShape.parse(method), []

    class Checked(LookaheadDrafter):
        def propose(self, sequence, depth):
            self.text = sequence.tolist()
            return super().propose(sequence, depth)

        def observe(self, logits):
            for index, got in enumerate(logits, start=1):
                row, column = divmod(index, self.shape.window)
                guessed = self.window[0][1 : column + 1] + [self.window[r][column] for r in range(1, row + 1)]
                expected = target(torch.tensor([[*self.text, *guessed]])).logits[0, -1]
                torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
                compared.append(index)
            super().observe(logits)

    prompt = torch.randint(256, (10,), generator=torch.Generator().manual_seed(1)).tolist()
    result = speculative_decode(target, Checked(shape), prompt, max_new_tokens=16, eos_token_ids=())
    assert len(compared) == len(result.rounds) * (shape.window * (shape.ngram - 1) - 1)
    assert shape.window == 1 or sum(round.accepted for round in result.rounds) > 0


def test_the_n_grams_of_a_round_enter_the_pool_and_rows_move_up():
    drafter = LookaheadDrafter(TreeShape.parse("lookahead_w2_n4_g2"))
    prompt = torch.tensor([7])
    drafter.start(prompt, features=None, capacity=99, generator=torch.Generator(), clock=None)
    assert drafter.window == [[7, 7]] * 3
    drafter.window = [[0, 11], [20, 21], [30, 31]]
    tree = drafter.propose(torch.tensor([7, 5]), 3)
    assert len(tree.tokens) == 0 and tree.beside.tokens.tolist() == [11, 20, 21, 30, 31]
    logits = torch.eye(50)[[0, 0, 0, 40, 41]]
    drafter.observe(logits)
    assert drafter.window == [[20, 21], [30, 31], [40, 41]]
    assert drafter.pool.newest_first(5) == [(20, 30, 40)] and drafter.pool.newest_first(11) == [(21, 31, 41)]
    again = drafter.propose(torch.tensor([7, 5, 5]), 2)  # two places left
    assert again.tokens.tolist() == [20, 30] and again.beside.tokens.tolist() == [21, 30, 31, 40, 41]


# --- pool and tree -----------------------------------------------------------------------------------------------


def test_the_pool_keeps_the_newest_behind_each_token():
    pool = NgramPool(2)
    for continuation in ((1, 1), (2, 2), (1, 1), (3, 3)):  # (1, 1) was seen again: (2, 2) is the oldest
        pool.add(9, continuation)
    pool.add(8, (4, 4))
    assert pool.newest_first(9) == [(3, 3), (1, 1)] and pool.newest_first(8) == [(4, 4)] and not pool.newest_first(7)


def test_no_tree_has_more_n_grams_than_asked_for():
    sizes, deepest = [], []

    class Counted(LookaheadDrafter):
        def propose(self, sequence, depth):
            tree = super().propose(sequence, depth)
            leaves = set(range(len(tree.tokens))) - set(tree.parents.tolist())
            sizes.append(len(leaves))
            deepest.append(int(tree.depth.max()) if len(tree.tokens) else 0)
            return tree

    target, _ = second_order_pair()
    for seed in range(20):
        run(target, Counted(SHAPE), SHAPE, SamplingParams(1.5), seed, length=20)
    assert max(sizes) == 3 and max(deepest) == 2


def test_n_grams_that_begin_alike_share_their_nodes():
    tokens, parents, depths = merge([(1, 2, 3), (1, 4, 3), (5, 2, 3), (1, 2, 6)])
    assert tokens == [1, 2, 3, 4, 3, 5, 2, 3, 6]
    assert parents == [-1, 0, 1, 0, 3, -1, 5, 6, 1] and depths == [1, 2, 3, 2, 3, 1, 2, 3, 3]
    assert merge([]) == ([], [], [])


# --- texts -------------------------------------------------------------------------------------------------------


def run(target, drafter, shape, params, seed, length=5):
    return decode(
        target, drafter, torch.tensor(PROMPT), params=params, vocab_size=VOCAB, shape=shape,
        max_new_tokens=length, eos_token_ids=frozenset(), generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


CASES = [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.5}, {"temperature": 1.0, "top_p": 0.8}]


@pytest.mark.parametrize("filters", CASES)
def test_the_loop_is_exact(filters):
    target, _ = second_order_pair()
    params = SamplingParams(**filters)
    counts = loop_counts(target, LookaheadDrafter(SHAPE), SHAPE, params, 2_000, num_tokens=4)
    assert chi_square_p_value(counts, exact_probs(target, filters, num_tokens=4)) > 0.01 / len(CASES)
    texts = [run(target, LookaheadDrafter(SHAPE), SHAPE, params, seed) for seed in range(200)]
    assert sum(round.accepted for text in texts for round in text.rounds) > 40
    assert any(round.judged > round.accepted for text in texts for round in text.rounds)


def test_counts_leave_the_window_out():
    result = speculative_decode(
        random_model("tiny_llama"), None, [1, 2, 3], method="lookahead_w5_n3_g2", max_new_tokens=40, eos_token_ids=(),
        record_trees=40,
    )  # fmt: skip
    assert max(round.drafted for round in result.rounds) <= 4 and max(round.depth for round in result.rounds) == 2
    assert all(len(tree.tokens) == round.drafted for tree, round in zip(result.trees, result.rounds))
    assert result.rounds[0].drafted == 0 and result.fallback_steps == 0  # the pool was empty, no position ran out


def test_a_model_given_beside_is_not_asked():
    class Broken(torch.nn.Module):
        def forward(self, *args, **options):
            raise AssertionError("asked")

    for method in ("lookahead_w5_n3_g5", "ngram_n3_k5"):
        options = {"method": method, "max_new_tokens": 8}
        target = random_model("tiny_llama")
        ours = speculative_decode(target, Broken(), [1, 2, 3], **options)
        assert ours.token_ids == speculative_decode(target, None, [1, 2, 3], **options).token_ids


# --- names and mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "depth", "num_nodes"),
    [("lookahead_w5_n3_g5", 2, 10 + 9), ("lookahead_w7_n5_g7", 4, 28 + 27), ("ngram_n3_k5", 5, 5)],
)
def test_names_and_sizes(name, depth, num_nodes):
    shape = TreeShape.parse(name)
    assert (str(shape), shape.depth, shape.num_nodes, shape.num_expanded) == (name, depth, num_nodes, 0)
    assert not shape.needs_draft and TreeShape.parse("chain_k5").needs_draft
    assert shape.cut(1).depth == 1 and shape.cut(1).ngram == shape.ngram


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lookahead_w5_n2_g5", "n-grams of 3 tokens or more"),
        ("lookahead_w200_n7_g5", "more than 1024 nodes"),
        ("lookahead_w0_n3_g5", "no such method; use for example chain_k5, .*ngram_n3_k5 or lookahead_w5_n3_g5"),
        ("ngram_k5", "no such method"),
    ],
)
def test_mistakes_are_told_in_one_line(name, told):
    with pytest.raises(UserError, match=f"^decode.methods={name}: .*{told}") as error:
        TreeShape.parse(name)
    assert "\n" not in str(error.value)


def test_a_method_that_needs_a_draft_says_so():
    with pytest.raises(UserError, match=r"^method=chain_k4: needs a draft"):
        speculative_decode(random_model("tiny_llama"), None, [1, 2, 3], method="chain_k4", max_new_tokens=8)
