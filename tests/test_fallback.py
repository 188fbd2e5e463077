"""fallback=auto: what is decided on invented times, and that no decision which knows the past alone changes a text's
distribution."""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from eval.decode import check_decode, method_name
from eval.drafters import DraftModelChain, DraftModelTree
from eval.fallback import FIRST_PAUSE, NUM_PLAIN, NUM_ROUNDS, PLAIN_EVERY, Fallback, gain
from eval.loop import decode, speculative_decode
from eval.measures import Trial, decode_metrics
from eval.tree import Tree, TreeShape
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import load_target
from models.tiny import random_model
from tests.exact_loop import PROMPT, VOCAB, exact_probs, second_order_pair
from tests.test_decode import DECODE
from tests.test_loop import first_blocks, prompts
from tests.test_tree_drafters import random_head
from tests.test_verification import chi_square_p_value


@pytest.fixture(scope="module")
def target():
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


def played(num_rounds: int, tokens_at: Callable[[int], float], *, round_s: float = 2.0) -> str:
    """Decisions on invented times: P a plain step of one second, s a round. Fractions of a token add up over rounds."""
    fallback, text, owed = Fallback(), "", 0.0
    for index in range(num_rounds):
        is_plain = fallback.wants_plain()
        owed += tokens_at(index)
        emitted = max(1, math.floor(owed))
        owed -= emitted
        fallback.add(1 if is_plain else emitted, 1.0 if is_plain else round_s, is_plain=is_plain)
        text += "P" if is_plain else "s"
    return text


def runs_of(text: str) -> list[tuple[str, int]]:
    return [(kind, len(list(group))) for kind, group in itertools.groupby(text)]


def test_gain_by_hand():
    assert gain([1, 2, 3], [4.0, 4.0, 4.0], [3.0]) == 1.5
    assert gain([3, 3], [2.0, 2.0, 90.0], [1.0, 1.0, 1.0, 50.0]) == 1.5  # hiccups
    assert gain([1], [1.0], []) == math.inf


def test_without_a_gain_pauses_double():
    probe = NUM_ROUNDS + 1  # the first round of one is not timed
    expected = [("P", NUM_PLAIN), ("s", probe)]
    for pause in (32, 64, 128, 256, 512, 512):
        expected += [("P", pause), ("s", probe)]
    assert runs_of(played(sum(n for _, n in expected), lambda index: 1.5)) == expected


def test_with_a_gain_only_single_plain_steps_stand_between():
    runs = runs_of(played(600, lambda index: 3.0))
    assert runs[0] == ("P", NUM_PLAIN)
    assert [n for kind, n in runs[1:-1] if kind == "s"] == [PLAIN_EVERY] * (len(runs[1:-1]) // 2)
    assert {n for kind, n in runs[1:] if kind == "P"} == {1}


def test_a_text_that_changes_is_noticed_both_ways():
    text = played(900, lambda index: 1.2 if 200 <= index < 500 else 3.0)
    assert "P" * FIRST_PAUSE not in text[:200] and "P" * FIRST_PAUSE in text[200:260]
    assert text[-100:].count("P") <= 2
    bad = text[240:500]
    assert bad.count("P") > 0.75 * len(bad)


def test_what_is_lost_where_speculation_is_dear():
    """Rounds at a gain of 0.65: always speculating would lose a third of the speed, this a tenth at most."""
    text = played(300, lambda index: 1.3)
    emitted = text.count("P") + 1.3 * text.count("s")
    assert emitted / (text.count("P") + 2.0 * text.count("s")) > 0.9


# --- through the loop ------------------------------------------------------------------------------------------------


class Adversary(Fallback):
    """Decides by whatever the past shows: lengths of rounds, the clock's last digits, its own count."""

    def __init__(self, kind: str):
        self.kind, self.num_tokens, self.count, self.digits = kind, 1, 0, 0

    def wants_plain(self) -> bool:
        return {
            "after a rejection": self.num_tokens == 1,
            "after an acceptance": self.num_tokens > 1,
            "every other": self.count % 2 == 0,
            "clock": self.digits % 2 == 0,
        }[self.kind]

    def add(self, num_tokens: int, seconds: float, *, is_plain: bool) -> None:
        # a plain step always says 1: "after a rejection" would never speculate again
        self.num_tokens = 2 if is_plain and self.kind == "after a rejection" else num_tokens
        self.count += 1
        self.digits = int(seconds * 1e7)


KINDS = ["after a rejection", "after an acceptance", "every other", "clock"]


def counts_with(
    drafter, shape: TreeShape, make: Callable[[], Fallback], num_draws: int, num_tokens: int
) -> tuple[np.ndarray, int, int]:  # (V^n,), plain steps by choice, rounds
    target, _ = second_order_pair()
    counts, generator = np.zeros((VOCAB,) * num_tokens), torch.Generator().manual_seed(3)
    paused = rounds = 0
    for _ in range(num_draws):
        result = decode(
            target, drafter, torch.tensor(PROMPT), params=SamplingParams(1.0), vocab_size=VOCAB, shape=shape,
            max_new_tokens=num_tokens, eos_token_ids=frozenset(), generator=generator, fallback=make(),
        )  # fmt: skip
        counts[tuple(result.token_ids)] += 1
        paused, rounds = paused + result.paused_steps, rounds + len(result.rounds)
    return counts.reshape(-1), paused, rounds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["chain_k2", "dynamic_d2_k2_n4"])
def test_sampled_text_is_exact_whatever_decides_by_the_past(method, kind):
    target, draft = second_order_pair()
    shape, options = TreeShape.parse(method), {"vocab_size": VOCAB, "params": SamplingParams(1.0)}
    drafter = DraftModelChain(draft, **options) if shape.kind == "chain" else DraftModelTree(draft, shape, **options)
    counts, paused, rounds = counts_with(drafter, shape, lambda: Adversary(kind), 1_000, num_tokens=4)
    assert 0.1 < paused / rounds < 0.9  # both kinds of steps
    exact = exact_probs(target, {"temperature": 1.0}, num_tokens=4)
    assert chi_square_p_value(counts, exact) > 0.01 / (2 * len(KINDS))


def test_a_decision_that_sees_the_verdict_is_not_exact():
    """Negative control: a draft that would be rejected is never shown, and a plain step stands in its place."""

    class Peeks(DraftModelChain):
        def propose(self, sequence, depth):
            tree = super().propose(sequence, depth)
            ahead = torch.Generator()
            ahead.set_state(self.generator.get_state())
            uniform = torch.rand(1, len(tree.tokens), dtype=torch.float64, generator=ahead)[0, 0]
            probs = target.table[sequence[-2], sequence[-1]].softmax(-1)
            token = tree.tokens[0]
            return tree if uniform * tree.probs[0, token] < probs[token] else Tree.empty(torch.device("cpu"))

    target, draft = second_order_pair()
    drafter = Peeks(draft, vocab_size=VOCAB, params=SamplingParams(1.0))
    counts, _, _ = counts_with(drafter, TreeShape.chain(1), lambda: None, 1_000, num_tokens=3)
    assert chi_square_p_value(counts, exact_probs(target, {"temperature": 1.0}, num_tokens=3)) < 1e-6


class Scripted(Fallback):
    """Pauses of all lengths."""

    def __init__(self) -> None:
        self.script: Iterator[str] = itertools.cycle("PssPPPsPssssPPPPPPPsss")

    def wants_plain(self) -> bool:
        return next(self.script) == "P"

    def add(self, num_tokens: int, seconds: float, *, is_plain: bool) -> None:
        pass


@pytest.mark.parametrize(("kind", "method"), [
    ("draft", "chain_k3"), ("draft", "dynamic_d3_k2_n5"), ("eagle3", "chain_k3"), ("eagle3", "dynamic_d3_k2_n5"),
    ("eagle1", "static_2x2"), ("none", "ngram_n3_k3"), ("none", "lookahead_w3_n3_g3"),
])  # fmt: skip
def test_greedy_text_stays_and_drafting_goes_on_as_if_nothing_had_paused(target, kind, method):
    """Behind a pause the drafter knows what one knows that never paused: it proposes the same trees."""
    draft = {"draft": lambda: first_blocks(target.model, 7), "none": lambda: None}.get(
        kind, lambda: random_head(target, kind)
    )()
    for prompt in prompts(2):
        options = {"max_new_tokens": 40, "eos_token_ids": ()}
        plain = speculative_decode(target, None, prompt, **options)
        options |= {"method": method, "record_trees": 100}
        steady, paused = (
            speculative_decode(target, draft, prompt, fallback=fallback, **options)
            for fallback in ("never", Scripted())
        )
        assert paused.token_ids == steady.token_ids == plain.token_ids
        assert steady.paused_steps == 0 and paused.fallback_steps == 0
        assert paused.paused_steps > 5
        if kind == "none":
            continue  # what these propose depends on the rounds
        trees = {tree.start: tree for tree in steady.trees}
        common = [tree for tree in paused.trees if tree.tokens and tree.start in trees]
        assert len(common) >= 3
        for tree in common:
            assert (tree.tokens, tree.parents) == (trees[tree.start].tokens, trees[tree.start].parents)


def test_auto_counts_its_plain_steps_apart():
    target = random_model("tiny_llama")
    options = {"max_new_tokens": 60, "eos_token_ids": (), "method": "chain_k3"}
    draft = random_model("tiny_llama", seed=5)  # never right, and as slow as the target
    auto = speculative_decode(target, draft, prompts(1)[0], fallback="auto", **options)
    plain = speculative_decode(target, None, prompts(1)[0], fallback="auto", max_new_tokens=60, eos_token_ids=())
    assert auto.token_ids == plain.token_ids and plain.paused_steps == 0
    assert NUM_PLAIN + FIRST_PAUSE <= auto.paused_steps <= sum(r.drafted == 0 for r in auto.rounds)
    assert auto.tau == (len(auto.token_ids) - 1) / len(auto.rounds)
    assert sum(r.judged for r in auto.rounds) == sum(r.judged for r in auto.rounds if r.drafted)  # alpha: of rounds
    metrics = decode_metrics([Trial("s", "0", plain, auto)], shape=TreeShape.chain(3), suffix="s")
    assert metrics["paused_steps/s"].value == auto.paused_steps and metrics["fallback_steps/s"].value == 0
    assert "paused_steps/s" not in decode_metrics([Trial("s", "0", plain, plain)], shape=TreeShape.chain(3), suffix="s")


def test_figures_of_auto_have_a_name_of_their_own_and_a_wrong_word_is_refused():
    assert method_name("chain_k4", "probabilistic", 0.0, fallback="auto") == "chain_k4_auto"
    assert method_name("chain_k4", "greedy", 1.0, fallback="auto") == "chain_k4_auto_greedy_draft"
    check_decode(DECODE | {"fallback": "auto"})
    with pytest.raises(UserError, match=r"^decode\.fallback=sometimes: unknown; use never or auto$"):
        check_decode(DECODE | {"fallback": "sometimes"})
    with pytest.raises(UserError, match=r"^decode\.fallback=sometimes: unknown; use never or auto$"):
        speculative_decode(random_model("tiny_llama"), None, [1], fallback="sometimes")
