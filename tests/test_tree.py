"""Trees: shapes, masks, growth, the rule (by enumeration, against the reference, by chi-square), and the target's
forward over them."""

import itertools

import numpy as np
import pytest
import torch

from eval.reference import joint_probs, reference_probs, reference_tree_outcomes, tree_joint_probs
from eval.tree import Candidates, Level, Tree, TreeShape, grow, tree_mask
from eval.verification import verify_tree, verify_tree_greedy
from models.errors import UserError
from models.kv_cache import RollbackCache, forward_with_cache
from models.sampling import SamplingParams, filtered_probs, sample
from models.tiny import random_model
from tests.test_verification import chi_square_p_value

VOCAB = 4
SHAPES = ["static_2x2", "static_3x1", "dynamic_d2_k2_n4", "dynamic_d2_k3_n7"]
FILTERS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_p": 0.9},
]
CASES = list(itertools.product(FILTERS, SHAPES))


def random_tree(num_nodes, vocab_size, generator):
    """Any parents before their children; siblings have different tokens."""
    parents, tokens = [], []
    for node in range(num_nodes):
        parents.append(int(torch.randint(-1, node, (), generator=generator)) if node else -1)
        taken = {tokens[i] for i in range(node) if parents[i] == parents[-1]}
        free = [t for t in range(vocab_size) if t not in taken]
        tokens.append(free[int(torch.randint(len(free), (), generator=generator))])
    return make_tree(tokens, parents)


def make_tree(tokens, parents, probs=None):
    depth = []
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    return Tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depth), probs)


def paths_of(tree):
    """Token ids from the root's child to each node."""
    paths = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


# --- shapes and masks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_nodes", "num_expanded", "cut"),
    [
        ("chain_k5", 5, 4, "chain_k2"),
        ("static_3x2x1", 15, 9, "static_3x2"),
        ("static_4", 4, 0, "static_4"),
        ("dynamic_d5_k10_n60", 60, 40, "dynamic_d2_k10_n60"),
        ("dynamic_d2_k2_n60", 6, 2, "dynamic_d2_k2_n60"),
    ],
)
def test_names_and_sizes(name, num_nodes, num_expanded, cut):
    shape = TreeShape.parse(name)
    assert (str(shape), shape.num_nodes, shape.num_expanded) == (name, num_nodes, num_expanded)
    assert str(shape.cut(2)) == cut and shape.cut(9) == shape


@pytest.mark.parametrize(
    "name", ["", "chain", "chain_k0", "chain_5", "static_", "static_3x", "static_3x0", "dynamic_d5_k10", "tree_k3",
             "chain_k1025", "static_10x10x10x10", "dynamic_d200_k10_n60"],
)  # fmt: skip
def test_names_that_are_no_method(name):
    with pytest.raises(UserError, match=f"^decode.methods={name}: "):
        TreeShape.parse(name)


def test_the_limit_that_a_tree_breaks_is_named():
    with pytest.raises(UserError, match="a tree of more than 1024 nodes"):
        TreeShape.parse("static_10x10x10x10")
    with pytest.raises(UserError, match="the draft would read more than 1024 nodes"):  # it keeps 60
        TreeShape.parse("dynamic_d200_k10_n60")


def test_mask_shows_ancestors_only():
    tree = make_tree([5, 6, 7, 8], [-1, -1, 0, 2])
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    assert tree_mask(tree).int().tolist() == expected
    chain = Tree.chain(torch.arange(3))
    assert chain.is_chain and not tree.is_chain and Tree.empty(torch.device("cpu")).is_chain
    assert torch.equal(tree_mask(chain), torch.ones(4, 4).tril().bool())


# --- growth ----------------------------------------------------------------------------------------------------------


class Table:
    """A draft that is a function of the path: logits (vocab_size,) after every prefix. Checks what levels say."""

    def __init__(self, logits, prefix=()):  # prefix -> (V,)
        self.logits, self.levels = logits, [[tuple(prefix)]]
        self.read = []  # paths, in the order in which they were read

    def best(self, prefixes, k):
        best = torch.stack([self.logits(p) for p in prefixes]).log_softmax(-1).topk(k)
        return Candidates(best.indices, best.values)

    def first(self, k):
        return self.best(self.levels[0], k)

    def expand(self, level: Level, k):
        above = self.levels[-1]
        paths = [(*above[row], token) for row, token in zip(level.parent_rows.tolist(), level.tokens.tolist())]
        self.read += paths
        for path, visible in zip(paths, level.mask):
            seen = {path[:i] for i in range(1, len(path) + 1)}
            assert [p in seen for p in self.read] == visible.tolist()
        assert all(len(path) == level.depth + len(self.levels[0][0]) for path in paths)
        self.levels.append(paths)
        return self.best(paths, k)


def noise(vocab_size, scale=1.5, seed=0):
    """Fixed random logits after every prefix."""
    return lambda prefix: (
        torch.randn(vocab_size, generator=torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)) * scale
    )


def test_static_tree_takes_the_best_children():
    table = Table(noise(9))
    tree, read_index = grow(table.first, table.expand, TreeShape.parse("static_3x2x1"))
    paths = paths_of(tree)
    assert len(set(map(tuple, paths))) == 15 and tree.depth.tolist() == [1] * 3 + [2] * 6 + [3] * 6
    for path, num_siblings, first in ((paths[0], 3, 0), (paths[3], 2, 3), (paths[13], 1, 13)):
        best = table.logits(tuple(path[:-1])).topk(num_siblings).indices.tolist()
        assert [p[-1] for p in paths[first : first + num_siblings]] == best
    assert read_index.tolist() == [*range(9), *[-1] * 6]
    assert torch.equal(tree.mask, tree_mask(tree._replace(mask=None)))


@pytest.mark.parametrize("name", ["dynamic_d4_k3_n10", "dynamic_d3_k4_n2", "dynamic_d3_k9_n60", "dynamic_d1_k3_n9"])
def test_dynamic_tree_keeps_the_most_probable_nodes(name):
    shape = TreeShape.parse(name)
    table = Table(noise(9, seed=2))
    tree, read_index = grow(table.first, table.expand, shape)

    # the same by plain lists: (log-probability, path)
    def scored(path):
        logprobs = [table.logits(path[:i]).log_softmax(-1)[path[i]].item() for i in range(len(path))]
        return sum(logprobs), path

    level = sorted((scored((t,)) for t in range(9)), reverse=True)[: shape.top_k]
    everything = list(level)
    for _ in range(shape.depth - 1):
        grown = [sorted((scored((*p, t)) for t in range(9)), reverse=True)[: shape.top_k] for _, p in level]
        everything += itertools.chain(*grown)
        level = sorted(itertools.chain(*grown), reverse=True)[: shape.top_k]
    expected = {path for _, path in sorted(everything, reverse=True)[: shape.total_tokens]}
    paths = [tuple(path) for path in paths_of(tree)]
    assert set(paths) == expected and len(paths) == len(expected) <= shape.num_nodes
    assert all(parent < node for node, parent in enumerate(tree.parents.tolist()))
    assert tree.depth.tolist() == [len(path) for path in paths]
    scores = [scored(path)[0] for path in paths]
    for parent in set(tree.parents.tolist()):
        siblings = [scores[i] for i, p in enumerate(tree.parents.tolist()) if p == parent]
        assert siblings == sorted(siblings, reverse=True)
    for path, index in zip(paths, read_index.tolist()):
        assert table.read[index] == path if index >= 0 else path not in table.read


@pytest.mark.parametrize("sure", [0.0, 100.0])
def test_ties_keep_a_dynamic_tree_whole(sure):
    """Children as probable as their parents (a draft that is sure), and all nodes alike (one that knows nothing)."""

    def logits(prefix):
        return torch.zeros(6).index_fill(0, torch.tensor([len(prefix)]), sure)

    for total in range(1, 20):
        table = Table(logits)
        tree = grow(table.first, table.expand, TreeShape("dynamic", 4, top_k=3, total_tokens=total)).tree
        assert len(tree.tokens) == total
        assert all(parent < node for node, parent in enumerate(tree.parents.tolist()))
        if sure and total >= 4:
            assert [0, 1, 2, 3] in paths_of(tree)
        assert sum(d == 1 for d in tree.depth.tolist()) == (tree.parents == -1).sum()


# --- the rule --------------------------------------------------------------------------------------------------------


def test_greedy_walk_by_hand():
    tree = make_tree([5, 6, 7, 5, 8], [-1, -1, 1, 1, 2])
    for target_tokens, path, next_token in (
        ([9, 0, 0, 0, 0, 0], [], 9),
        ([5, 1, 0, 0, 0, 0], [0], 1),
        ([6, 0, 5, 0, 4, 0], [1, 3], 4),
        ([6, 0, 7, 8, 0, 2], [1, 2, 4], 2),
        ([6, 0, 8, 8, 0, 2], [1], 8),
    ):
        assert verify_tree_greedy(torch.tensor(target_tokens), tree) == (path, next_token)
    assert verify_tree_greedy(torch.tensor([3]), Tree.empty(torch.device("cpu"))) == ([], 3)
    twins = make_tree([5, 5, 6], [-1, -1, 1])  # the first of equal siblings is taken
    assert verify_tree_greedy(torch.tensor([5, 6, 6, 0]), twins) == ([0], 6)


@pytest.mark.parametrize("seed", range(5))
def test_certain_children_follow_the_rule_exactly(seed):
    """One draw a node against children tried in turn: every outcome of the walk, weighed."""
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(4, VOCAB, generator)
    probs = (torch.randn(5, VOCAB, generator=generator) * 1.5).double().softmax(-1)
    measured: dict = {}
    for target_tokens in itertools.product(range(VOCAB), repeat=5):
        path, next_token = verify_tree_greedy(torch.tensor(target_tokens), tree)
        weight = np.prod([probs[row, token].item() for row, token in enumerate(target_tokens)])
        measured[tuple(path), next_token] = measured.get((tuple(path), next_token), 0.0) + weight
    expected = reference_tree_outcomes(probs.numpy(), tree.tokens.tolist(), tree.parents.tolist(), None)
    assert measured.keys() == expected.keys()
    for outcome, weight in expected.items():
        np.testing.assert_allclose(measured[outcome], weight, rtol=1e-9)


@pytest.mark.parametrize("is_drawn", [False, True])
def test_sampled_verification_follows_the_rule(is_drawn):
    generator = torch.Generator().manual_seed(3)
    tree = make_tree([2, 0, 2, 1, 3], [-1, -1, -1, 0, 0])  # equal siblings, as independent draws may give
    if is_drawn:
        tree = tree._replace(probs=torch.randn(5, VOCAB, generator=generator).softmax(-1)[[0, 0, 0, 3, 3]])
    target_probs = torch.randn(6, VOCAB, generator=generator).softmax(-1)
    outcomes = reference_tree_outcomes(
        target_probs.double().numpy(), tree.tokens.tolist(), tree.parents.tolist(),
        None if tree.probs is None else tree.probs.double().numpy(),
    )  # fmt: skip
    np.testing.assert_allclose(sum(outcomes.values()), 1, atol=1e-9)
    index = {outcome: i for i, outcome in enumerate(outcomes)}
    counts = np.zeros(len(outcomes))
    rows = (target_probs, lambda row: target_probs[row])  # both ways to hand them over
    for draw in range(6_000):
        path, next_token = verify_tree(rows[draw % 2], tree, generator)
        counts[index[tuple(path), next_token]] += 1
    assert chi_square_p_value(counts, np.array(list(outcomes.values()))) > 0.01 / 2


def _tables(seed, vocab_size=VOCAB):
    """Logits of target and draft after every prefix: unlike, but overlapping."""
    target, other = noise(vocab_size, seed=seed), noise(vocab_size, scale=1.0, seed=seed + 100)
    return target, lambda prefix: 0.6 * target(prefix) + other(prefix)


def _joint(logits, filters, horizon=2, vocab_size=VOCAB):
    return joint_probs(lambda prefix: reference_probs(logits(prefix).numpy(), **filters), horizon, vocab_size)


def _top_children(draft, num_children):
    """Certain children of the reference: the draft's best."""

    def children(prefix, depth):
        if depth == len(num_children):
            return []
        eye = np.eye(len(draft(prefix)))
        return [(eye[t], eye[t]) for t in draft(prefix).topk(num_children[depth]).indices.tolist()]

    return children


@pytest.mark.parametrize("filters", FILTERS)
def test_the_rule_is_exact_by_enumeration(filters):
    target, draft = _tables(seed=7)

    def probs(prefix):
        return reference_probs(target(prefix).numpy(), **filters)

    def softmax(prefix):
        return reference_probs(draft(prefix).numpy())

    expected = _joint(target, filters)
    exact = [
        _top_children(draft, (3, 2)),
        _top_children(draft, (2, 1)),
        lambda prefix, depth: [(softmax(prefix),) * 2] * (2 - depth),  # siblings drawn independently
    ]
    for children in exact:
        joint = tree_joint_probs(probs, children, horizon=2, vocab_size=VOCAB)
        np.testing.assert_allclose(joint, expected, atol=1e-12)
    # what is wrong is seen: the best children, said to be drawn from the softmax
    wrong = tree_joint_probs(
        probs,
        lambda prefix, depth: [(drawn, softmax(prefix)) for drawn, _ in _top_children(draft, (2, 1))(prefix, depth)],
        horizon=2,
        vocab_size=VOCAB,
    )
    assert np.abs(wrong - expected).max() > 0.01


def _draw_two_tokens(target, draft, filters, shape, num_draws, generator):
    """Counts of the first two tokens that the rule emits: one round, and a second one where the first gave one token.

    Trees are functions of the prefix; the target's draws at all nodes come vectorised, equal ones are walked once.
    """
    counts = np.zeros((VOCAB, VOCAB))
    params = SamplingParams(**filters)

    def rounds(prefix, depth, num_rows):  # -> tokens emitted, how often
        table = Table(draft, prefix)
        tree = grow(table.first, table.expand, shape.cut(depth)).tree
        paths = [(), *map(tuple, paths_of(tree))]
        probs = filtered_probs(torch.stack([target((*prefix, *path)) for path in paths]), params)  # (M+1, V)
        drawn = sample(probs.expand(num_rows, -1, -1), generator)  # (R, M+1)
        for target_tokens, count in zip(*drawn.unique(dim=0, return_counts=True)):
            path, next_token = verify_tree_greedy(target_tokens, tree)
            yield (*(tree.tokens[node].item() for node in path), next_token), count.item()

    singles = np.zeros(VOCAB, dtype=int)
    for emitted, count in rounds((), 2, num_draws):
        if len(emitted) == 1:
            singles[emitted[0]] += count
        else:
            counts[emitted[:2]] += count
    for first in np.flatnonzero(singles):
        for emitted, count in rounds((int(first),), 1, int(singles[first])):
            counts[first, emitted[0]] += count
    return counts.reshape(-1)


@pytest.mark.parametrize(("filters", "name"), CASES)
def test_output_has_the_exact_joint_distribution(filters, name):
    target, draft = _tables(seed=3)
    num_draws = 6400 * (VOCAB**2 - 1)
    generator = torch.Generator().manual_seed(5)
    counts = _draw_two_tokens(target, draft, filters, TreeShape.parse(name), num_draws, generator)
    exact = _joint(target, filters).reshape(-1)
    assert counts.sum() == num_draws
    assert 0.5 * np.abs(counts / num_draws - exact).sum() < 0.01
    assert chi_square_p_value(counts, exact) > 0.01 / len(CASES)


def test_certain_children_declared_as_drawn_fail_the_same_test():
    """Negative control: the draft's two best tokens, verified against its softmax."""
    target, draft = _tables(seed=3)
    probs = torch.stack([target(())] * 3).softmax(-1)
    right = make_tree(draft(()).topk(2).indices.tolist(), [-1, -1])
    wrong = right._replace(probs=draft(()).softmax(-1).expand(2, -1))
    exact = reference_probs(target(()).numpy())
    for tree, is_exact in ((right, True), (wrong, False)):
        counts, generator = np.zeros(VOCAB), torch.Generator().manual_seed(1)
        for _ in range(3_000):
            path, next_token = verify_tree(probs, tree, generator)
            counts[tree.tokens[path[0]] if path else next_token] += 1
        p_value = chi_square_p_value(counts, exact)
        assert p_value > 0.01 if is_exact else p_value < 1e-6


# --- the target's forward --------------------------------------------------------------------------------------------


def _tree_logits(model, prompt, tree, *, static=False, mask=None):
    """The target reads prompt, root and tree; logits (M+1, V) and its cache."""
    capacity = -(-(len(prompt) + len(tree.tokens) + 8) // 64) * 64
    cache = RollbackCache(model.config.num_hidden_layers, capacity, static=static)
    forward_with_cache(model, prompt[None, :-1], cache)
    block = torch.cat((prompt[-1:], tree.tokens))[None]
    positions = cache.length + torch.cat((torch.zeros(1, dtype=torch.long), tree.depth))[None]
    mask = cache.tree_mask(tree_mask(tree) if mask is None else mask)
    return forward_with_cache(model, block, cache, position_ids=positions, attention_mask=mask).logits[0], cache


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
@torch.inference_mode()
def test_each_path_of_a_tree_reads_as_a_chain(shape, static):
    """Logits of every node, and of what follows every accepted path once the cache has kept it."""
    model, generator = random_model(shape), torch.Generator().manual_seed(2)
    prompt = torch.randint(259, (9,), generator=generator)
    for num_nodes in (1, 7):
        tree = random_tree(num_nodes, 259, generator)
        logits, _ = _tree_logits(model, prompt, tree, static=static)
        paths = [[], *paths_of(tree)]
        for path, row in zip(paths, logits):
            expected = model(torch.cat((prompt, torch.tensor(path, dtype=torch.long)))[None]).logits[0, -1]
            torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-4)
        node = int(torch.randint(num_nodes, (), generator=generator))
        kept = [node]
        while tree.parents[kept[0]] >= 0:
            kept.insert(0, int(tree.parents[kept[0]]))
        _, cache = _tree_logits(model, prompt, tree, static=static)
        cache.gather(len(prompt), len(prompt) + torch.tensor(kept))
        logits = forward_with_cache(model, torch.tensor([[3, 4]]), cache).logits[0]
        ids = torch.tensor([*prompt, *paths[node + 1], 3, 4])[None]
        torch.testing.assert_close(logits, model(ids).logits[0, -2:], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_visible_sibling_changes_the_logits():
    """Negative control of the test above."""
    model, prompt = random_model("tiny_llama"), torch.arange(9)
    tree = make_tree([5, 6], [-1, -1])
    mask = tree_mask(tree)
    right, _ = _tree_logits(model, prompt, tree)
    mask = mask.clone()
    mask[2, 1] = True
    wrong, _ = _tree_logits(model, prompt, tree, mask=mask)
    assert (right[2] - wrong[2]).abs().max() > 0.1 and torch.equal(right[:2], wrong[:2])


def test_models_that_build_their_own_mask_refuse_trees():
    cache = RollbackCache(1, 8, static=False, window=True)
    with pytest.raises(UserError, match=r"^decode\.methods: trees need full attention"):
        cache.tree_mask(torch.ones(2, 2, dtype=torch.bool))
