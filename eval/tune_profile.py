"""What this machine takes: seconds of a target forward by its tokens, of drafting by shape, and of the loop itself.

All of it at the workload's context length, by medians of interleaved repeats. Drafting is timed behind a target
forward, as in the loop: the weights of a draft that would fit the processor's cache do not stay there.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from eval.drafters import Clock, Drafter, make_drafter
from eval.loop import DecodeResult, capture_features
from eval.tree import Tree, TreeShape, tree_mask
from models.kv_cache import RollbackCache, forward_with_cache
from models.sampling import SamplingParams
from models.target import Target

FORWARD_TOKENS = (1, 2, 3, 4, 5, 6, 9, 13, 17, 25, 33, 61)
SPREAD = 0.05  # of medians that are equal
TREE_WIDTHS = (1, 4, 6, 10)


@dataclass(frozen=True)
class TargetProfile:
    context: int  # tokens before the forward
    causal_s: dict[int, float]  # tokens of one forward -> seconds
    tree_s: dict[int, float]  # with a tree's mask

    @property
    def is_disturbed(self) -> bool:
        """Whether a forward of more tokens took clearly less time than one of a single token: something else ran
        meanwhile, and drafting looks cheaper than it is."""
        return min(self.causal_s.values()) < (1 - SPREAD) * self.causal_s[1]

    def seconds(self, num_tokens: float | np.ndarray, *, is_chain: bool) -> float | np.ndarray:
        """Between what was measured on a line, beyond it along the last one."""
        return between(self.causal_s if is_chain else self.causal_s | self.tree_s, num_tokens)


@dataclass(frozen=True)
class DraftProfile:
    start_s: float  # reading the prompt
    chain_s: dict[float, dict[int, float]]  # temperature -> tokens of a chain -> seconds
    first_s: dict[int, float] = field(default_factory=dict)  # top k of a tree -> seconds of its first level
    level_s: dict[int, float] = field(default_factory=dict)  # nodes expanded in a level -> seconds of each further one

    def seconds(self, shape: TreeShape, temperature: float) -> float:
        """Of one proposal."""
        if shape.kind == "chain":
            return between(self.chain_s[temperature], shape.depth)
        if shape.kind == "dynamic":
            return between(self.first_s, shape.top_k) + (shape.depth - 1) * between(self.level_s, shape.top_k)
        widths = [prod(shape.children[: depth + 1]) for depth in range(shape.depth - 1)]
        return between(self.first_s, shape.children[0]) + sum(between(self.level_s, width) for width in widths)


def between(measured: Mapping[int, float], at: float | np.ndarray) -> float | np.ndarray:
    """Linear between the measured points, constant below the first, along the last slope beyond the last."""
    x, y = np.array(sorted(measured)), np.array([measured[n] for n in sorted(measured)])
    found = np.interp(at, x, y)
    if len(x) > 1:
        slope = max(0.0, (y[-1] - y[-2]) / (x[-1] - x[-2]))
        found = found + slope * np.maximum(0.0, np.asarray(at) - x[-1])
    return found if isinstance(at, np.ndarray) else float(found)


@torch.inference_mode()
def profile_target(
    target: Target, token_ids: Sequence[int], *, max_chain: int, max_tokens: int, repeats: int
) -> TargetProfile:
    """token_ids: the context. max_chain: the longest chain; max_tokens: the largest forward that is of interest."""
    model, context = target.model, len(token_ids)
    ids = torch.tensor(token_ids, device=model.device)
    longest_causal = min((n for n in FORWARD_TOKENS if n > max_chain), default=FORWARD_TOKENS[-1])
    sizes = [n for n in FORWARD_TOKENS if n <= max(max_tokens, longest_causal)]
    cache = RollbackCache.for_model(model, context + sizes[-1])
    forward_with_cache(model, ids[None], cache, logits_to_keep=1)
    block = ids.repeat(-(-sizes[-1] // context))[: sizes[-1]]  # (n,)
    with_trees = sizes if cache.own_mask else []  # else transformers builds the mask, and trees are refused
    masks = {n: tree_mask(_bushy(n - 1, model.device)) for n in with_trees if 2 < n <= max_tokens}
    clock = Clock(model.device)
    seconds: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        for size in sizes:
            for is_tree in (False, True):
                if (is_tree and size not in masks) or (not is_tree and size > longest_causal):
                    continue
                begin = clock.now()
                arguments = {}
                if is_tree:
                    depth = masks[size].sum(1) - 1  # (n,)
                    arguments = {
                        "position_ids": (cache.length + depth)[None],
                        "attention_mask": cache.tree_mask(masks[size]),
                    }
                forward_with_cache(model, block[None, :size], cache, **arguments)
                if repeat:  # the first of all warms up
                    seconds[size, is_tree].append(clock.now() - begin)
                cache.rollback(context)
    found = {key: median(values) for key, values in seconds.items()}
    return TargetProfile(
        context,
        causal_s={size: value for (size, is_tree), value in found.items() if not is_tree},
        tree_s={size: value for (size, is_tree), value in found.items() if is_tree},
    )


def _bushy(num_nodes: int, device: torch.device) -> Tree:
    """Two children behind every node, the root included."""
    parents = (torch.arange(num_nodes, device=device) - 2).div(2, rounding_mode="floor").clamp_min(-1)
    depth = (torch.arange(num_nodes, device=device) + 2).float().log2().floor().long()
    return Tree(torch.zeros_like(parents), parents, depth)


@torch.inference_mode()
def profile_draft(
    target: Target,
    draft: nn.Module,
    token_ids: Sequence[int],
    *,
    context: int,
    temperatures: Sequence[float],
    max_chain: int,
    max_depth: int,
    max_width: int,
    repeats: int,
) -> DraftProfile:
    """token_ids: `context` of them and two more a repeat; every round accepts one token, so that two are read anew.

    max_chain, max_depth: the longest chain, the deepest tree. max_width: children that a node may have, 0 for no trees.
    """
    model = target.model
    sequence = torch.tensor(token_ids, device=model.device)  # (T,)
    clock, generator = Clock(model.device), torch.Generator(model.device).manual_seed(0)
    widths = [width for width in TREE_WIDTHS if width <= max_width]
    deep = min(4, max_depth)
    shapes = [
        *((TreeShape.chain(k), t) for t in temperatures for k in sorted({1, min(4, max_chain), max_chain})),
        *((_full_tree(depth, width), 0.0) for width in widths for depth in sorted({1, deep})),
    ]
    drafters = {
        (shape, t): make_drafter(
            draft,
            shape,
            vocab_size=target.vocab_size,
            params=SamplingParams(t),
            draft_sampling="probabilistic",
        )
        for shape, t in shapes
    }
    kind = next(iter(drafters.values())).features
    cache = RollbackCache.for_model(model, len(sequence) + 1)
    with capture_features(target, kind) as features_of:
        forward_with_cache(model, sequence[None], cache, logits_to_keep=1)
        features = features_of(slice(None))  # (T, ...)
    starts: list[float] = []
    seconds: dict[tuple[TreeShape, float], list[float]] = defaultdict(list)
    for (shape, _), drafter in drafters.items():
        begin = clock.now()
        drafter.start(
            sequence[: context - 1],
            features=None if features is None else features[: context - 1],
            capacity=len(sequence) + shape.depth,
            generator=generator,
            clock=clock,
        )
        starts.append(clock.now() - begin)
    for repeat in range(repeats + 1):
        end = context + 2 * repeat
        for (shape, t), drafter in drafters.items():
            cache.rollback(context)
            forward_with_cache(model, sequence[None, end - 1 : end], cache)
            begin = clock.now()
            tree = drafter.propose(sequence[:end], shape.depth)
            if repeat:
                seconds[shape, t].append(clock.now() - begin)
            _accept_one(drafter, tree, sequence, end, features)
    found = {key: median(values) for key, values in seconds.items()}
    chain_s: dict[float, dict[int, float]] = {t: {} for t in temperatures}
    for (shape, t), value in found.items():
        if shape.kind == "chain":
            chain_s[t][shape.depth] = value
    first_s = {width: found[_full_tree(1, width), 0.0] for width in widths}
    level_s = {}
    if deep > 1:
        level_s = {w: max(0.0, found[_full_tree(deep, w), 0.0] - first_s[w]) / (deep - 1) for w in widths}
    return DraftProfile(median(starts), chain_s, first_s, level_s)


def _full_tree(depth: int, width: int) -> TreeShape:
    return TreeShape("dynamic", depth, top_k=width, total_tokens=width * depth)


def _accept_one(drafter: Drafter, tree: Tree, sequence: Tensor, end: int, features: Tensor | None) -> None:
    """The token behind the root counts as drafted, the one behind it as the target's."""
    path = torch.arange(min(1, len(tree.tokens)), device=sequence.device)
    drafter.accept(path, int(sequence[end + 1]), None if features is None else features[end - 1 : end + len(path)])


def loop_seconds(results: Sequence[DecodeResult]) -> float:
    """Seconds a round outside the target's forwards and the drafting."""
    outside = sum(r.wall_s - r.prefill_s - r.target_s - r.draft_s for r in results)
    return outside / max(1, sum(len(r.rounds) for r in results))
