"""Trees from draft models and EAGLE heads, and the loop around them: cached = uncached whatever was accepted, greedy
output = plain output, sampled output = the target's exact joint distribution, ends."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import eval.drafters
import eval.loop
from eval.drafters import Clock, DraftModelTree, NoDraft, make_drafter
from eval.loop import speculative_decode
from eval.reference import joint_probs, reference_probs
from eval.tree import Tree, TreeShape, grow, tree_mask
from models.eagle import build_eagle
from models.errors import UserError
from models.sampling import SamplingParams, filtered_probs
from models.target import Target, load_target
from models.tiny import byte_tokenizer
from tests.exact_loop import PROMPT, VOCAB, exact_probs, loop_counts, second_order_pair
from tests.test_loop import chat_prompts, first_blocks, gpt2, prompts
from tests.test_tree import make_tree
from tests.test_verification import chi_square_p_value

CPU = torch.device("cpu")
TREES = ["static_3x2x1", "dynamic_d3_k3_n8"]


@pytest.fixture(scope="module")
def target():
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


@pytest.fixture(scope="module")
def gpt2_target():
    return load_target("random:tiny_gpt2", dtype="fp32", device="cpu", tap_ids=[0, 2, 3])


def random_head(target, kind="eagle3"):
    """Untrained. EAGLE-3 drafts from 200 ids only, most of them not where the target has them."""
    if kind == "eagle1":
        return build_eagle(target=target, kind=kind, draft_vocab_size=None).eval()
    ids = torch.arange(0, target.vocab_size, max(1, target.vocab_size // 200))[:200] + 3
    ids = ids[ids < target.vocab_size]
    return build_eagle(target=target, kind=kind, draft_vocab_size=len(ids), draft_vocab=ids).eval()


def make_draft(target, kind):
    return first_blocks(target.model, 7) if kind == "draft" else random_head(target, kind)


# --- cached = uncached -----------------------------------------------------------------------------------------------


def features_of(target, ids, kind):
    states = target.states(torch.tensor([ids]))
    return {"taps": states.taps, "final_hidden": states.final_hidden}[kind][0]


def uncached_logits(target, draft, sequence, path):
    """Logits over the target's ids behind sequence and path, all of it read at once; -inf where the draft has none."""
    ids = [*sequence, *path]
    if not hasattr(draft, "project"):
        return draft(torch.tensor([ids])).logits[0, -1]
    hidden = draft.project(features_of(target, sequence[:-1], draft.features))  # (n-1, D)
    for end in range(len(sequence), len(ids) + 1):
        tokens, positions = torch.tensor([ids[1:end]]), torch.arange(end - 1)[None]
        output = draft(tokens, hidden[None], positions)[0]  # (end-1, D)
        hidden = torch.cat((hidden, output[-1:]))
    logits = draft.logits(output[-1])
    everywhere = torch.full((target.vocab_size,), -torch.inf)
    everywhere[draft.target_ids(torch.arange(len(logits)))] = logits
    return everywhere


class Levels:
    """Stands in for `grow`: keeps what the drafter said about every node that it read."""

    def __call__(self, first, expand, shape):
        self.paths, self.said = [()], []  # paths of the last level; (path, tokens, logprobs)

        def recorded_first(k):
            candidates = first(k)
            self.said.append(((), candidates.tokens[0], candidates.logprobs[0]))
            return candidates

        def recorded_expand(level, k):
            rows = zip(level.parent_rows.tolist(), level.tokens.tolist())
            self.paths = [(*self.paths[row], token) for row, token in rows]
            candidates = expand(level, k)
            self.said += zip(self.paths, candidates.tokens, candidates.logprobs)
            return candidates

        return grow(recorded_first, recorded_expand, shape)


def drive(target, draft, shape, *, temperature, check, num_rounds=8):
    """A drafter without a loop: paths of all kinds are accepted, none, the deepest, any."""
    generator = torch.Generator().manual_seed(1)
    drafter = make_drafter(
        draft, shape, vocab_size=target.vocab_size, params=SamplingParams(temperature), draft_sampling="probabilistic"
    )
    sequence = torch.randint(256, (9,), generator=generator).tolist()
    kind = drafter.features
    features = None if kind is None else features_of(target, sequence[:-1], kind)
    drafter.start(torch.tensor(sequence[:-1]), features=features, capacity=80, generator=generator, clock=Clock(CPU))
    for step in range(num_rounds):
        path: list[int] = []
        if step != 3:  # a plain step
            tree = drafter.propose(torch.tensor(sequence), shape.depth)
            check(sequence, tree)
            if step % 4 == 1:
                path = [int(tree.depth.argmax())]
            elif step % 4 == 2:
                path = [int(torch.randint(len(tree.tokens), (), generator=generator))]
            while path and tree.parents[path[0]] >= 0:
                path.insert(0, int(tree.parents[path[0]]))
        root_at, next_token = len(sequence) - 1, int(torch.randint(256, (), generator=generator))
        sequence += tree.tokens[path].tolist()
        features = None if kind is None else features_of(target, sequence, kind)[root_at:]
        sequence.append(next_token)
        drafter.accept(torch.tensor(path, dtype=torch.long), next_token, features)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("kind", ["draft", "eagle3", "eagle1"])
@torch.inference_mode()
def test_each_path_of_a_tree_is_drafted_as_a_chain(target, kind, name, monkeypatch):
    """What the draft says behind every node that it reads, in every round, whatever was accepted before."""
    draft = make_draft(target, kind)
    levels = Levels()
    monkeypatch.setattr(eval.drafters, "grow", levels)

    def check(sequence, tree):
        assert len(levels.said) > 4
        for path, tokens, logprobs in levels.said:
            expected = (uncached_logits(target, draft, sequence, path) / 0.7).log_softmax(-1)
            torch.testing.assert_close(logprobs, expected[tokens], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(logprobs, expected.topk(len(tokens)).values, atol=1e-4, rtol=1e-4)

    drive(target, draft, TreeShape.parse(name), temperature=0.7, check=check)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@torch.inference_mode()
def test_a_heads_chain_declares_what_it_is_drawn_from(target, kind):
    draft, params = make_draft(target, kind), SamplingParams(0.7)

    def check(sequence, tree):
        assert tree.is_chain and tree.probs.shape == (3, target.vocab_size)
        for depth in range(3):
            logits = uncached_logits(target, draft, sequence, tree.tokens[:depth].tolist())
            torch.testing.assert_close(tree.probs[depth], filtered_probs(logits, params), atol=1e-4, rtol=1e-3)
            assert tree.probs[depth, tree.tokens[depth]] > 0

    drive(target, draft, TreeShape.chain(3), temperature=0.7, check=check)


# --- oracles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain_k4", *TREES])
@pytest.mark.parametrize("kind", ["draft", "eagle3", "eagle1"])
def test_greedy_equals_plain_greedy(target, kind, name):
    draft, taus = make_draft(target, kind), []
    options = {"max_new_tokens": 24, "eos_token_ids": ()}
    for prompt in prompts(2):
        ours = speculative_decode(target, draft, prompt, method=name, **options)
        assert ours.token_ids == speculative_decode(target, None, prompt, **options).token_ids
        taus.append(ours.tau)
        assert all(r.drafted <= TreeShape.parse(name).num_nodes for r in ours.rounds)
    assert max(taus) > 1 or kind != "draft"


@pytest.mark.parametrize("name", ["chain_k4", *TREES])
def test_greedy_equals_plain_greedy_with_learned_positions(gpt2_target, name):
    options = {"max_new_tokens": 24, "eos_token_ids": ()}
    for prompt, draft in zip(prompts(2), (copy.deepcopy(gpt2_target.model), random_head(gpt2_target))):
        ours = speculative_decode(gpt2_target, draft, prompt, method=name, **options)
        assert ours.token_ids == speculative_decode(gpt2_target, None, prompt, **options).token_ids


def test_a_draft_equal_to_the_target_is_accepted_to_the_last_level(target):
    options = {"max_new_tokens": 25, "eos_token_ids": ()}
    ours = speculative_decode(target, target.model, prompts(1)[0], method="static_2x2x1", **options)
    assert [(r.accepted, r.judged, r.depth, r.drafted) for r in ours.rounds] == [(3, 3, 3, 10)] * 6
    assert ours.token_depth == [0, *[1, 2, 3, 0] * 6] and ours.tau == 4


class Planted(NoDraft):
    """Puts a known continuation on one branch of a random tree; all else is wrong."""

    def __init__(self, continuation, seed):
        self.continuation, self.generator = continuation, torch.Generator().manual_seed(seed)
        self.planted = []

    def start(self, prompt, **options):
        self.prompt_len = len(prompt)

    def max_draft_len(self, num_tokens):
        return 3

    def propose(self, sequence, depth):
        right = self.continuation[len(sequence) - self.prompt_len :][:depth]
        parents = [-1, -1, -1, *[i // 3 for i in range(9)], *[i // 3 + 3 for i in range(27)]]
        tokens, on_path, node = [None] * len(parents), 0, -1
        for child in range(len(parents)):  # children of a node differ from one another and from what is right
            level = 0 if child < 3 else 1 if child < 12 else 2
            wrong = (right[level] if level < len(right) else 0) + 1 + child % 3
            tokens[child] = wrong % 256
        length = min(len(right), int(torch.randint(4, (), generator=self.generator)))
        while on_path < length:
            children = [i for i, parent in enumerate(parents) if parent == node]
            node = children[int(torch.randint(3, (), generator=self.generator))]
            tokens[node] = right[on_path]
            on_path += 1
        self.planted.append(length)
        return make_tree(tokens, parents)


def test_the_longest_right_branch_is_accepted(target):
    prompt = prompts(1)[0]
    options = {"max_new_tokens": 40, "eos_token_ids": ()}
    plain = speculative_decode(target, None, prompt, **options)
    drafter = Planted(plain.token_ids, seed=0)
    ours = speculative_decode(target, drafter, prompt, method="static_3x3x3", record_trees=2, **options)
    assert ours.token_ids == plain.token_ids
    assert [r.accepted for r in ours.rounds[:-1]] == drafter.planted[:-1] and set(drafter.planted) == {0, 1, 2, 3}
    for r in ours.rounds[:-1]:
        assert (r.drafted, r.depth, r.judged) == (39, 3, min(3, r.accepted + 1))
    assert len(ours.trees) == 2
    for record, r in zip(ours.trees, ours.rounds):
        emitted = [*(record.tokens[node] for node in record.path), record.next_token]
        assert ours.token_ids[record.start : record.start + len(emitted)] == emitted
        assert ours.token_ids[record.start - 1] == record.root and len(record.path) == r.accepted
        assert [record.parents[node] for node in record.path] == [-1, *record.path][: r.accepted]


def test_a_visible_sibling_breaks_the_greedy_text(target, monkeypatch):
    """Negative control: the same text is not plain greedy's when siblings see one another."""

    def wrong_mask(tree):
        mask = tree_mask(tree).clone()
        mask[1:, 1:4] = True
        return mask

    prompt = prompts(1)[0]
    options = {"max_new_tokens": 40, "eos_token_ids": ()}
    plain = speculative_decode(target, None, prompt, **options)
    monkeypatch.setattr(eval.loop, "tree_mask", wrong_mask)
    drafter = Planted(plain.token_ids, seed=0)
    ours = speculative_decode(target, drafter, prompt, method="static_3x3x3", **options)
    assert ours.token_ids != plain.token_ids


def test_hooks_live_as_long_as_the_text(target):
    def num_hooks():
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in target.modules())

    counts = []

    class Watched(eval.drafters.EagleDrafter):
        def propose(self, sequence, depth):
            counts.append(num_hooks())
            return super().propose(sequence, depth)

    for kind, expected in (("eagle3", 3), ("eagle1", 1)):
        counts.clear()
        drafter = Watched(
            random_head(target, kind), TreeShape.chain(2), vocab_size=target.vocab_size, params=SamplingParams()
        )
        speculative_decode(target, drafter, prompts(1)[0], max_new_tokens=8, eos_token_ids=())
        assert num_hooks() == 0 and set(counts) == {expected}


# --- exactness through the loop --------------------------------------------------------------------------------------


NUM_TOKENS = 4  # with two levels the fourth is the first that can come from the target behind a node of the second
LOOP_CASES = [
    ("static_2x2", {"temperature": 0.7}, 8_000),
    ("dynamic_d2_k2_n4", {"temperature": 1.0}, 4_000),
    ("static_3x1", {"temperature": 1.5, "top_p": 0.9}, 4_000),
    *(
        pytest.param(name, {"temperature": temperature}, 4_000, marks=pytest.mark.slow)
        for name, temperature in (("static_2x2", 1.0), ("dynamic_d2_k2_n4", 0.7), ("dynamic_d2_k2_n4", 1.5))
    ),
]


@pytest.mark.parametrize(("name", "filters", "num_draws"), LOOP_CASES)
def test_the_loop_with_trees_is_exact(name, filters, num_draws):
    target, draft = second_order_pair()
    shape, params = TreeShape.parse(name), SamplingParams(**filters)
    drafter = DraftModelTree(draft, shape, vocab_size=VOCAB, params=params)
    counts = loop_counts(target, drafter, shape, params, num_draws, num_tokens=NUM_TOKENS)
    assert chi_square_p_value(counts, exact_probs(target, filters, num_tokens=NUM_TOKENS)) > 0.01 / len(LOOP_CASES)


def test_the_loop_with_a_visible_sibling_or_a_wrong_proposal_is_not(monkeypatch):
    """Negative controls of the test above."""

    class Wrong(DraftModelTree):
        def propose(self, sequence, depth):
            tree = super().propose(sequence, depth)
            paths_before = [sequence[-1] if p < 0 else tree.tokens[p] for p in tree.parents]
            before = [sequence[-2] if p < 0 else sequence[-1] for p in tree.parents]  # depth 2 at most
            return tree._replace(probs=self.model.table[torch.stack(before), torch.stack(paths_before)].softmax(-1))

    target, draft = second_order_pair()
    shape, params = TreeShape.parse("static_2x2"), SamplingParams(1.0)
    exact = exact_probs(target, {"temperature": 1.0}, num_tokens=NUM_TOKENS)
    drafter = Wrong(draft, shape, vocab_size=VOCAB, params=params)
    counts = loop_counts(target, drafter, shape, params, 1_500, num_tokens=NUM_TOKENS)
    assert chi_square_p_value(counts, exact) < 1e-6

    def wrong_mask(tree):
        mask = tree_mask(tree).clone()
        mask[1:, 2] = True  # everyone sees the root's second child
        return mask

    monkeypatch.setattr(eval.loop, "tree_mask", wrong_mask)
    drafter = DraftModelTree(draft, shape, vocab_size=VOCAB, params=params)
    counts = loop_counts(target, drafter, shape, params, 1_500, num_tokens=NUM_TOKENS)
    assert chi_square_p_value(counts, exact) < 1e-6


def _five_ids():
    """A target over five ids, and an untrained head that drafts four of them."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=5, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    target = Target(model, byte_tokenizer(), name="five", tap_ids=[0, 1])
    ids = torch.tensor([0, 1, 3, 4])
    return target, build_eagle(target=target, draft_vocab_size=4, draft_vocab=ids).eval()


HEAD_CASES = [
    ("chain_k2", {"temperature": 0.7}, "probabilistic"),
    ("chain_k2", {"temperature": 1.0, "top_p": 0.9}, "probabilistic"),
    ("chain_k2", {"temperature": 1.5}, "greedy"),
    ("static_2x2", {"temperature": 1.0}, "greedy"),
    ("dynamic_d2_k2_n4", {"temperature": 1.0, "top_p": 0.9}, "greedy"),
    *(
        pytest.param(name, {"temperature": temperature}, "greedy", marks=pytest.mark.slow)
        for name in ("static_2x2", "dynamic_d2_k2_n4")
        for temperature in (0.7, 1.5)
    ),
]


@pytest.mark.parametrize(("name", "filters", "draft_sampling"), HEAD_CASES)
@torch.inference_mode()
def test_the_loop_with_a_head_is_exact(name, filters, draft_sampling):
    target, head = _five_ids()
    shape, params = TreeShape.parse(name), SamplingParams(**filters)
    drafter = make_drafter(head, shape, vocab_size=5, params=params, draft_sampling=draft_sampling)
    counts = loop_counts(target, drafter, shape, params, 1_500, num_tokens=3, vocab_size=5)
    pairs = list(itertools.product(range(5), repeat=2))
    logits = target.model(torch.tensor([[*PROMPT, *pair] for pair in pairs])).logits[:, 1:].numpy()  # (25, 3, V)
    row = {pair[:n]: logits[i, n] for i, pair in enumerate(pairs) for n in range(3)}
    exact = joint_probs(lambda prefix: reference_probs(row[prefix], **filters), 3, 5).reshape(-1)
    assert chi_square_p_value(counts, exact) > 0.01 / len(HEAD_CASES)


# --- ends ------------------------------------------------------------------------------------------------------------


def test_eos_inside_an_accepted_path_ends_the_text(target):
    for prompt in prompts(20):
        free = speculative_decode(target, None, prompt, max_new_tokens=12, eos_token_ids=()).token_ids
        if free[3] not in free[:3]:
            break
    result = speculative_decode(target, target.model, prompt, method="static_2x1x1x1x1", eos_token_ids=(free[3],))
    assert result.token_ids == free[:4] and result.finish_reason == "eos"
    (only,) = result.rounds
    assert (only.drafted, only.depth, only.judged, only.accepted, only.accepted_uncut) == (10, 5, 3, 3, 5)
    assert result.token_depth == [0, 1, 2, 3] and result.tau == 3


def test_max_new_tokens_inside_a_path_is_never_exceeded(target):
    head = random_head(target)
    for max_new_tokens in range(1, 7):
        for draft, name in ((target.model, "static_2x2x1"), (target.model, "dynamic_d4_k2_n8"), (head, "static_2x2")):
            result = speculative_decode(
                target, draft, prompts(1)[0], method=name, max_new_tokens=max_new_tokens, eos_token_ids=()
            )
            assert len(result.token_ids) == len(result.token_depth) == max_new_tokens
            assert result.finish_reason == "length"


@pytest.mark.parametrize("draft_positions", [32, 64, 128])
@pytest.mark.parametrize("name", ["static_3x2x1", "dynamic_d4_k3_n10"])
def test_positions_run_out(draft_positions, name):
    """Trees lose levels at the target's limit and fall back to plain steps behind the draft's."""
    target, draft = gpt2(64), gpt2(draft_positions, seed=draft_positions)
    options = {"max_new_tokens": 12, "eos_token_ids": ()}
    for length in (24, 31, 32, 55, 62, 63, 64):
        prompt = torch.randint(50, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        result = speculative_decode(target, draft, prompt, method=name, **options)
        assert result.token_ids == speculative_decode(target, None, prompt, **options).token_ids
        assert len(result.token_ids) == min(12, 65 - length)
        assert result.finish_reason == ("length" if length <= 53 else "positions")
        if draft_positions == 32 and length > 32:
            assert result.fallback_steps == len(result.rounds)
        if draft_positions == 128 and 55 <= length < 64:
            assert {r.depth for r in result.rounds} <= {0, 1, 2, 3, 4} and result.rounds[-1].depth < 3


@pytest.mark.parametrize("head_positions", [16, 1024])
def test_a_heads_positions_run_out(gpt2_target, head_positions):
    """256 positions of the target; a head with fewer falls back to plain steps."""
    head = random_head(gpt2_target)
    object.__setattr__(head.config, "max_position_embeddings", head_positions)
    for length in (1, 10, 20, 250, 256):
        prompt = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for name in ("chain_k4", "static_2x2x1"):
            options = {"max_new_tokens": 10, "eos_token_ids": ()}
            result = speculative_decode(gpt2_target, head, prompt, method=name, **options)
            assert result.token_ids == speculative_decode(gpt2_target, None, prompt, **options).token_ids
            assert len(result.token_ids) == min(10, 257 - length)
            plain = sum(r.drafted == 0 for r in result.rounds)
            if head_positions == 16:
                assert plain == len(result.rounds) if length >= 20 else (plain > 0) == (length == 10)


# --- options ---------------------------------------------------------------------------------------------------------


def test_mistakes_are_named(target):
    head = random_head(target)
    for draft in (target.model, head):
        with pytest.raises(UserError, match=r"^decode\.methods=static_300: 300 children for a draft of"):
            speculative_decode(target, draft, [1, 2], method="static_300")
        with pytest.raises(UserError, match=r"^method=tree: no such method"):
            speculative_decode(target, draft, [1, 2], method="tree")
    with pytest.raises(UserError, match="reads its taps"):
        speculative_decode(target.model, head, [1, 2])
    other = Target(target.model, target.tokenizer, name="other", tap_ids=[0, 1, 2])
    with pytest.raises(UserError, match=r"set target\.tap_ids"):
        speculative_decode(other, head, [1, 2])


def test_an_eagle_1_head_needs_no_taps(target):
    bare = Target(target.model, target.tokenizer, name="bare")
    result = speculative_decode(bare, random_head(target, "eagle1"), prompts(1)[0], max_new_tokens=8, eos_token_ids=())
    assert len(result.token_ids) == 8 and result.rounds[0].drafted == 4


def test_times_add_up(target):
    result = speculative_decode(
        target, random_head(target), prompts(1)[0], method="dynamic_d3_k3_n8", max_new_tokens=20, eos_token_ids=()
    )
    assert 0 < result.draft_forward_s < result.draft_s and 0 <= result.overhead_s < result.wall_s


def test_an_empty_tree_is_a_plain_step(target):
    class Silent(NoDraft):
        def max_draft_len(self, num_tokens):
            return 4

        def propose(self, sequence, depth):
            return Tree.empty(sequence.device)

    options = {"max_new_tokens": 8, "eos_token_ids": ()}
    for temperature in (0.0, 1.0):
        ours = speculative_decode(target, Silent(), prompts(1)[0], temperature=temperature, **options)
        plain = speculative_decode(target, None, prompts(1)[0], temperature=temperature, **options)
        assert ours.token_ids == plain.token_ids and ours.rounds == plain.rounds


# --- the real target -------------------------------------------------------------------------------------------------


def _greedy_on_the_real_target(smollm2, num_prompts, max_new_tokens):
    target = Target(smollm2.model, smollm2.tokenizer, name=smollm2.name, tap_ids="default")
    head, draft = build_eagle(target=target).eval(), first_blocks(target.model, 29)
    runs = [(head, "chain_k4"), (head, "static_3x2x1"), (head, "dynamic_d4_k4_n16"), (draft, "static_3x2x1")]
    taus = []
    for prompt in chat_prompts(target.tokenizer, num_prompts):
        plain = speculative_decode(target, None, prompt, max_new_tokens=max_new_tokens)
        for model, name in runs:
            ours = speculative_decode(target, model, prompt, method=name, max_new_tokens=max_new_tokens)
            assert ours.token_ids == plain.token_ids, (name, prompt)
        taus.append(ours.tau)
    assert np.mean(taus) > 1.5


@pytest.mark.slow
def test_greedy_equals_plain_greedy_on_the_real_target(smollm2):
    _greedy_on_the_real_target(smollm2, num_prompts=8, max_new_tokens=32)


@pytest.mark.long
def test_greedy_equals_plain_greedy_on_the_real_target_at_length(smollm2):
    _greedy_on_the_real_target(smollm2, num_prompts=50, max_new_tokens=64)
