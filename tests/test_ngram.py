"""Prompt lookup: the index against a plain search, exactness through the loop, and what repeating text gains."""

import numpy as np
import pytest
import torch

from eval.loop import decode
from eval.ngram import NgramDrafter, NgramIndex
from eval.tree import TreeShape
from models.sampling import SamplingParams
from tests.exact_loop import PROMPT, VOCAB, exact_probs, loop_counts, second_order_pair
from tests.test_verification import chi_square_p_value

SHAPE = TreeShape.parse("ngram_n2_k3")


def searched(tokens, n, count):
    """The module's first lines, read from the text anew."""
    for length in range(n, 0, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                period = tokens[end:]
                return [period[i % len(period)] for i in range(count)]
    return []


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_index_finds_what_a_search_of_the_whole_text_finds(n):
    random = np.random.default_rng(n)
    tokens = random.integers(4, size=200).tolist()
    index, read, lengths = NgramIndex(n), 0, set()
    while read < len(tokens):
        step = int(random.integers(1, 5))
        index.extend(tokens[read : read + step])
        read += step
        drafted = index.continuation(6)
        assert drafted == searched(tokens[:read], n, 6)
        lengths.add(len(drafted))
    assert 6 in lengths


def test_the_longest_match_wins_and_of_equal_ones_the_latest():
    index = NgramIndex(2)
    index.extend([1, 2, 7, 9, 2, 8, 1, 2])
    assert index.continuation(2) == [7, 9]  # behind (1, 2), although 2 stood later before 8
    index.extend([5, 2])
    assert index.continuation(1) == [5]  # (5, 2) is new; 2 stood last before 5
    index.extend([6])
    assert index.continuation(3) == []


CASES = [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.5}, {"temperature": 1.0, "top_p": 0.8}]


@pytest.mark.parametrize("filters", CASES)
def test_the_loop_is_exact(filters):
    target, _ = second_order_pair()
    params = SamplingParams(**filters)
    counts = loop_counts(target, NgramDrafter(SHAPE), SHAPE, params, 2_000, num_tokens=4)
    assert chi_square_p_value(counts, exact_probs(target, filters, num_tokens=4)) > 0.01 / len(CASES)
    texts = [sampled(target, params, seed) for seed in range(200)]
    assert sum(round.accepted for text in texts for round in text.rounds) > 40
    assert any(round.judged > round.accepted for text in texts for round in text.rounds)


def test_the_loop_with_proposals_declared_as_drawn_is_not():
    """Negative control: a copied token accepted as if it had been drawn evenly."""

    class Wrong(NgramDrafter):
        def propose(self, sequence, depth):
            tree = super().propose(sequence, depth)
            return tree._replace(probs=torch.full((len(tree.tokens), VOCAB), 1 / VOCAB))

    target, _ = second_order_pair()
    counts = loop_counts(target, Wrong(SHAPE), SHAPE, SamplingParams(1.0), 2_000, num_tokens=4)
    assert chi_square_p_value(counts, exact_probs(target, {"temperature": 1.0}, num_tokens=4)) < 1e-6


def sampled(target, params, seed):
    return decode(
        target, NgramDrafter(SHAPE), torch.tensor(PROMPT), params=params, vocab_size=VOCAB, shape=SHAPE,
        max_new_tokens=5, eos_token_ids=frozenset(), generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


def test_a_periodic_text_is_accepted_whole():
    """A target whose argmax goes round in a circle of 3: only the first rounds have nothing to copy."""
    target, _ = second_order_pair()
    target.table = torch.eye(VOCAB).roll(1, 1)[[0, 1, 2, 0]].expand(VOCAB, VOCAB, VOCAB) * 9  # 0 -> 1 -> 2 -> 3 -> 1
    target.table = target.table.clone()
    target.table[:, 3] = torch.eye(VOCAB)[1] * 9
    shape = TreeShape.parse("ngram_n3_k5")
    result = decode(
        target, NgramDrafter(shape), torch.tensor([1, 2, 3, 1]), params=SamplingParams(), vocab_size=VOCAB, shape=shape,
        max_new_tokens=37, eos_token_ids=frozenset(), generator=torch.Generator(),
    )  # fmt: skip
    assert result.token_ids == [2, 3, 1] * 12 + [2]
    assert [round.accepted for round in result.rounds] == [5] * 6


def test_a_text_that_repeats_nothing_is_decoded_by_plain_steps():
    drafter = NgramDrafter(SHAPE)
    drafter.start(torch.arange(9), features=None, capacity=99, generator=torch.Generator(), clock=None)
    tree = drafter.propose(torch.arange(10), 3)
    assert len(tree.tokens) == 0 and tree.is_chain
