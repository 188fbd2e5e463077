"""What a draft would have got accepted at every place of a text that the target wrote.

Behind each token of a plainly decoded text the drafter proposes, and what follows in the text is the judge. For
proposals that are certain (chains at T = 0, trees, prompt n-grams, at any temperature) this is what the loop does: a
round goes on while the target's own token is among the children, and the text is a draw of the target's. A chain that
*draws* at T > 0 is judged by the target's probabilities: d tokens stand with chance prod_i min(1, p_i / q_i).

One wide tree with all its candidates answers for every smaller one: EAGLE-2's tree of n nodes is the n best of the same
candidates, and a static tree takes the first so many children.

Shapes: S places of a text (all its tokens but the last), D depths, N candidates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eval.drafters import Clock, Drafter
from eval.loop import capture_features
from eval.tree import Tree, TreeShape
from models.kv_cache import RollbackCache, forward_with_cache
from models.sampling import SamplingParams, filtered_probs
from models.target import Target

WIDE_TOP_K = 10


@dataclass(frozen=True)
class Text:
    """A prompt and the target's plain answer."""

    prompt: Sequence[int]
    answer: Sequence[int]

    @property
    def num_places(self) -> int:
        return len(self.answer) - 1


@dataclass(frozen=True)
class Replay:
    """One text judged for one method."""

    survival: np.ndarray  # (S, D) chance that a round from here has d tokens accepted or more
    num_nodes: np.ndarray  # (S,) drafted


def wide_shape(depth: int, num_ids: int) -> TreeShape:
    """A dynamic tree that keeps all its candidates."""
    top_k = min(WIDE_TOP_K, num_ids)
    return TreeShape("dynamic", depth, top_k=top_k, total_tokens=top_k + (depth - 1) * top_k**2)


@torch.inference_mode()
def proposals(target: Target, drafter: Drafter, text: Text, depth: int) -> Iterator[Tree]:
    """What the drafter proposes behind every token of the answer but the last, each time after a plain step."""
    device = target.model.device
    sequence = torch.tensor([*text.prompt, *text.answer], device=device)  # (T,)
    num_prompt, nothing = len(text.prompt), torch.empty(0, dtype=torch.long, device=device)
    with capture_features(target, drafter.features) as features_of:
        if drafter.features is not None:
            cache = RollbackCache.for_model(target.model, len(sequence))
            forward_with_cache(target.model, sequence[None], cache, logits_to_keep=1)
        features = features_of(slice(None))  # (T, ...)
    drafter.start(
        sequence[:num_prompt],
        features=None if features is None else features[:num_prompt],
        capacity=len(sequence) + depth,
        generator=torch.Generator(device).manual_seed(0),
        clock=Clock(device),
    )
    for place in range(text.num_places):
        end = num_prompt + place + 1
        allowed = min(depth, drafter.max_draft_len(end))
        yield drafter.propose(sequence[:end], allowed) if allowed > 0 else Tree.empty(device)
        drafter.accept(nothing, text.answer[place + 1], None if features is None else features[end - 1 : end])


@torch.inference_mode()
def replay_chain(target: Target, drafter: Drafter, text: Text, params: SamplingParams, depth: int) -> Replay:
    """A chain of `depth`; its first K tokens are what a chain of K would draft."""
    survival = np.zeros((text.num_places, depth))
    num_nodes = np.zeros(text.num_places, dtype=int)
    judge = _Judge(target, text, params)
    for place, tree in enumerate(proposals(target, drafter, text, depth)):
        num_nodes[place] = num_drafted = len(tree.tokens)
        if tree.probs is None:
            ahead = torch.tensor(text.answer[place + 1 : place + 1 + num_drafted])
            accepted = (tree.tokens[: len(ahead)].cpu() == ahead).double()
        else:
            accepted = judge.ratios(place, tree)
        survival[place, : len(accepted)] = accepted.cumprod(0).numpy()
    return Replay(survival, num_nodes)


class _Judge:
    """Reads drafted chains with the target, one place of a text after another."""

    def __init__(self, target: Target, text: Text, params: SamplingParams):
        self.target, self.text, self.params = target, text, params
        self.cache: RollbackCache | None = None

    def ratios(self, place: int, tree: Tree) -> Tensor:  # (K,) min(1, p/q) of each drafted token, given those before
        model, text = self.target.model, self.text
        committed = [*text.prompt, *text.answer[: place + 1]]  # the root is the last
        if self.cache is None:
            longest = len(text.prompt) + len(text.answer) + len(tree.tokens)
            self.cache = RollbackCache.for_model(model, longest)
        self.cache.rollback(min(self.cache.length, len(committed) - 1))
        unread = torch.tensor(committed[self.cache.length :], device=model.device)
        block = torch.cat((unread, tree.tokens))
        output = forward_with_cache(model, block[None], self.cache, logits_to_keep=len(tree.tokens) + 1)
        logits = output.logits[0, -len(tree.tokens) - 1 : -1, : self.target.vocab_size]  # (K, V)
        target_probs = filtered_probs(logits, self.params)
        chosen = tree.tokens[:, None]
        p, q = target_probs.gather(1, chosen)[:, 0], tree.probs.gather(1, chosen)[:, 0]
        return (p / q).clamp_max(1).double().cpu()


@dataclass(frozen=True)
class WideTree:
    """All candidates at one place, and the way of the text through them."""

    parents: np.ndarray  # (N,)
    depth: np.ndarray  # (N,)
    rank: np.ndarray  # (N,) 0 for the best child of its parent
    scores: np.ndarray  # (N,)
    path: list[int]  # nodes that hold the next tokens of the text
    num_ahead: int  # tokens of the text that could be drafted here: at its end fewer than the depth


def wide_trees(target: Target, drafter: Drafter, text: Text, depth: int) -> list[WideTree]:
    """drafter: one of `wide_shape`."""
    found = []
    for place, tree in enumerate(proposals(target, drafter, text, depth)):
        parents = tree.parents.cpu().numpy()
        ahead = text.answer[place + 1 : place + 1 + depth]
        scores = np.zeros(len(parents)) if tree.scores is None else tree.scores.float().cpu().numpy()
        path = _path(parents, tree.tokens.tolist(), ahead)
        found.append(WideTree(parents, tree.depth.cpu().numpy(), _ranks(parents), scores, path, len(ahead)))
    return found


def _path(parents: np.ndarray, tokens: list[int], ahead: Sequence[int]) -> list[int]:
    node_of = {edge: node for node, edge in reversed(list(enumerate(zip(parents.tolist(), tokens))))}
    path: list[int] = []
    for token in ahead:
        node = node_of.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def _ranks(parents: np.ndarray) -> np.ndarray:  # (N,); the children of one parent stand together, the best first
    is_first = np.ones(len(parents), dtype=bool)
    is_first[1:] = parents[1:] != parents[:-1]
    index = np.arange(len(parents))
    return index - np.maximum.accumulate(np.where(is_first, index, 0)) if len(parents) else index


def replay_trees(
    wide: Sequence[WideTree],  # S of them
    shapes: Sequence[TreeShape],
) -> dict[TreeShape, Replay]:
    """Every static and dynamic shape judged on the same candidates.

    Exact where a small tree expands nothing that the wide one left out, which its ten best of each level make rare.
    """
    lengths = {shape: np.zeros(len(wide), dtype=int) for shape in shapes}
    sizes = {shape: np.zeros(len(wide), dtype=int) for shape in shapes}
    dynamic: dict[int, list[TreeShape]] = {}
    for shape in shapes:
        if shape.kind == "dynamic":
            dynamic.setdefault(shape.top_k, []).append(shape)
    for place, tree in enumerate(wide):
        for shape in shapes:
            if shape.kind == "static":
                fits = [tree.rank[node] < children for node, children in zip(tree.path, shape.children)]
                lengths[shape][place] = _leading(fits)
                sizes[shape][place] = shape.num_nodes if len(tree.parents) else 0
        for top_k, of_width in dynamic.items():
            is_candidate = _narrowed(tree, top_k)
            order = np.flatnonzero(is_candidate)
            order = order[np.argsort(-tree.scores[order], kind="stable")]  # the best first, as `grow` keeps them
            for shape in of_width:
                kept = order[tree.depth[order] <= shape.depth][: shape.total_tokens]
                sizes[shape][place] = len(kept)
                lengths[shape][place] = _leading([node in kept for node in tree.path[: shape.depth]])
    return {
        shape: Replay((lengths[shape][:, None] > np.arange(shape.depth)).astype(float), sizes[shape])
        for shape in shapes
    }


def _leading(fits: Sequence[bool]) -> int:
    return next((index for index, fit in enumerate(fits) if not fit), len(fits))


def _narrowed(tree: WideTree, top_k: int) -> np.ndarray:  # (N,) bool
    """Candidates of a dynamic tree that expands `top_k` nodes of a level and gives each so many children."""
    is_candidate = np.zeros(len(tree.parents), dtype=bool)
    expanded = np.array([-1])
    for depth in range(1, int(tree.depth.max(initial=0)) + 1):
        level = np.flatnonzero((tree.depth == depth) & (tree.rank < top_k) & np.isin(tree.parents, expanded))
        is_candidate[level] = True
        expanded = level[np.argsort(-tree.scores[level], kind="stable")[:top_k]]
    return is_candidate


def rank_shares(wide: Sequence[Sequence[WideTree]], depth: int) -> list[list[float]]:  # (D, top k)
    """How often the target's token at a depth is the draft's first, second, ... choice there, given that the path to it
    was drafted, and that its last node was given children."""
    counts, totals = np.zeros((depth, WIDE_TOP_K)), np.zeros(depth)
    for trees in wide:
        for tree in trees:
            for d in range(min(len(tree.path) + 1, depth, tree.num_ahead)):
                parent = tree.path[d - 1] if d else -1
                if not (tree.parents == parent).any():
                    break
                totals[d] += 1
                if d < len(tree.path):
                    counts[d, tree.rank[tree.path[d]]] += 1
    return (counts / np.maximum(totals, 1)[:, None]).round(4).tolist()


def rounds_of(replay: Replay, draft_len: int) -> tuple[float, np.ndarray]:  # rounds, (S,) chance of a round from here
    """Rounds that the text takes: the first starts at place 0, one that accepts a tokens hands over a + 1 places on.

    tau is S / rounds.
    """
    num_places = len(replay.survival)
    survival = replay.survival[:, :draft_len]
    edges = np.ones((num_places, 1)), survival, np.zeros((num_places, 1))
    chances = -np.diff(np.concatenate(edges, axis=1), axis=1)  # (S, K+1) of 0 .. K accepted
    starts = np.zeros(num_places + draft_len + 1)
    starts[:1] = 1.0
    for place in range(num_places):
        starts[place + 1 : place + 2 + survival.shape[1]] += starts[place] * chances[place]
    starts = starts[:num_places]
    return float(starts.sum()), starts
