"""Trees of drafted tokens: their shapes, their attention mask, and how they grow level by level.

A tree hangs on the *root*, the last committed token, which is no node of it. Nodes are numbered so that a parent comes
before its children and a better child before a worse one. A chain is a tree in which every node has one child.

    chain_k5             5 tokens, one behind another
    static_3x2x1         the 3 best tokens behind the root, the 2 best behind each of them, then the best one each
    dynamic_d5_k10_n60   EAGLE-2 (Li et al. 2024, arXiv:2406.16858): 5 levels; of each level the 10 most probable nodes
                         are given their 10 best children; of all nodes the 60 most probable are kept
    ngram_n3_k5          prompt lookup (eval/ngram.py), no draft: a chain of the 5 tokens that followed the last 3, or
                         2, or 1, where they stood before
    lookahead_w5_n3_g5   lookahead decoding (eval/lookahead.py), no draft: a window of 5 columns collects 3-grams; up
                         to 5 of them behind the root are a tree
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from models.errors import UserError

MAX_NODES = 1024  # one target forward reads them all


class Beside(NamedTuple):
    """E tokens that the target reads behind a tree for the drafter's sake; they are never accepted, nor counted."""

    tokens: Tensor  # (E,)
    depth: Tensor  # (E,) places behind the root
    visible: Tensor  # (E, E) bool: which of one another they see; all see the root, none sees the tree


class Tree(NamedTuple):
    """M drafted tokens; the root is not among them. M = 0: nothing drafted."""

    tokens: Tensor  # (M,) int64 ids of the target
    parents: Tensor  # (M,) int64 index of the parent, -1 the root; parents stand before their children
    depth: Tensor  # (M,) int64, 1 for a child of the root
    probs: Tensor | None = None  # (M, V) fp32 what each token was *drawn from*; None: each was certain (one-hot)
    mask: Tensor | None = None  # (M+1, M+1) tree_mask, where the builder knows it
    beside: Beside | None = None
    scores: Tensor | None = None  # (M,) dynamic: log-probability of the path to each node, by the draft

    @classmethod
    def chain(cls, tokens: Tensor, probs: Tensor | None = None) -> "Tree":  # (K,), (K, V)
        parents, depth = _chain_structure(len(tokens), tokens.device)
        return cls(tokens, parents, depth, probs)

    @classmethod
    def empty(cls, device: torch.device) -> "Tree":
        return cls.chain(torch.empty(0, dtype=torch.long, device=device))

    @property
    def is_chain(self) -> bool:
        return self.parents.tolist() == list(range(-1, len(self.parents) - 1))


@dataclass(frozen=True)
class TreeShape:
    """What a drafter is asked for. The name that `str` gives is the method in configs and results."""

    kind: str  # chain, static, dynamic, ngram or lookahead
    depth: int
    children: tuple[int, ...] = ()  # static: children of every node at depth 0, 1, ...
    top_k: int = 0  # dynamic: nodes expanded at each depth, and children of each
    total_tokens: int = 0  # dynamic: nodes kept
    ngram: int = 0  # ngram: the longest ending looked for; lookahead: tokens of an n-gram, one more than drafted
    window: int = 0  # lookahead: columns of the window
    pool: int = 0  # lookahead: n-grams kept, and drafted, behind one token

    @classmethod
    def parse(cls, name: str, *, key: str = "decode.methods") -> "TreeShape":
        """Raises UserError, blaming the setting `key`, for a name that is no method."""
        if match := re.fullmatch(r"chain_k([1-9]\d*)", name):
            shape = cls.chain(int(match[1]))
        elif match := re.fullmatch(r"static_([1-9]\d*(?:x[1-9]\d*)*)", name):
            children = tuple(map(int, match[1].split("x")))
            shape = cls("static", len(children), children=children)
        elif match := re.fullmatch(r"dynamic_d([1-9]\d*)_k([1-9]\d*)_n([1-9]\d*)", name):
            depth, top_k, total_tokens = map(int, match.groups())
            shape = cls("dynamic", depth, top_k=top_k, total_tokens=total_tokens)
        elif match := re.fullmatch(r"ngram_n([1-9]\d*)_k([1-9]\d*)", name):
            shape = cls("ngram", int(match[2]), ngram=int(match[1]))
        elif match := re.fullmatch(r"lookahead_w([1-9]\d*)_n([1-9]\d*)_g([1-9]\d*)", name):
            window, ngram, pool = map(int, match.groups())
            if ngram < 3:
                raise UserError(f"{key}={name}: a window needs n-grams of 3 tokens or more; use n3")
            shape = cls("lookahead", ngram - 1, ngram=ngram, window=window, pool=pool)
        else:
            raise UserError(
                f"{key}={name}: no such method; use for example chain_k5, static_3x2x1, dynamic_d5_k10_n60, "
                "ngram_n3_k5 or lookahead_w5_n3_g5"
            )
        if shape.num_nodes > MAX_NODES:
            raise UserError(f"{key}={name}: a tree of more than {MAX_NODES} nodes; use a smaller one")
        if shape.num_expanded > MAX_NODES:
            raise UserError(
                f"{key}={name}: the draft would read more than {MAX_NODES} nodes to grow it; take fewer levels, or a "
                "smaller k"
            )
        return shape

    @classmethod
    def chain(cls, length: int) -> "TreeShape":
        return cls("chain", length)

    def __str__(self) -> str:
        if self.kind == "chain":
            return f"chain_k{self.depth}"
        if self.kind == "static":
            return f"static_{'x'.join(map(str, self.children))}"
        if self.kind == "ngram":
            return f"ngram_n{self.ngram}_k{self.depth}"
        if self.kind == "lookahead":
            return f"lookahead_w{self.window}_n{self.ngram}_g{self.pool}"
        return f"dynamic_d{self.depth}_k{self.top_k}_n{self.total_tokens}"

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model or head grows such trees."""
        return self.kind not in ("ngram", "lookahead")

    @property
    def num_nodes(self) -> int:
        """The most nodes a tree of this shape has, with the tokens beside it: what a target forward reads at most."""
        if self.kind in ("chain", "ngram"):
            return self.depth
        if self.kind == "lookahead":
            return self.pool * self.depth + self.window * (self.ngram - 1) - 1
        if self.kind == "static":
            return sum(prod(self.children[: d + 1]) for d in range(self.depth))
        return min(self.total_tokens, self.top_k + (self.depth - 1) * self.top_k**2)

    @property
    def num_expanded(self) -> int:
        """The most nodes a drafter reads to grow a tree of this shape: all but those of the last level."""
        if not self.needs_draft:
            return 0
        if self.kind == "dynamic":
            return (self.depth - 1) * self.top_k
        return self.cut(self.depth - 1).num_nodes if self.depth > 1 else 0

    def cut(self, depth: int) -> "TreeShape":
        """The same shape with at most `depth` levels."""
        assert depth >= 1, depth
        if depth >= self.depth:
            return self
        return replace(self, depth=depth, children=self.children[:depth])


def tree_mask(tree: Tree) -> Tensor:  # (M+1, M+1) bool
    """What each node may attend to, the root in row and column 0: the root, its ancestors and itself."""
    if tree.mask is not None:
        return tree.mask
    num_nodes = len(tree.parents)
    rows = torch.arange(num_nodes + 1, device=tree.parents.device)
    above = torch.cat((tree.parents.new_zeros(1), tree.parents + 1))  # (M+1,) row of the parent; the root's is itself
    mask = torch.eye(num_nodes + 1, dtype=torch.bool, device=tree.parents.device)
    ancestors = above
    for _ in range(int(tree.depth.max()) if num_nodes else 0):
        mask[rows, ancestors] = True
        ancestors = above[ancestors]
    return mask


class Level(NamedTuple):
    """Nodes that a drafter reads in one forward to give them children."""

    tokens: Tensor  # (n,) ids of the target
    depth: int  # 1 for children of the root
    parent_rows: Tensor  # (n,) row of the parent in the level before; zeros where the parent is the root
    mask: Tensor  # (n, R) bool: which of the R nodes read so far, these n last, each may attend to


class Candidates(NamedTuple):
    tokens: Tensor  # (n, k) ids of the target, most probable first
    logprobs: Tensor  # (n, k)


# reads a level and gives each of its nodes `k` children
Expand = Callable[[Level, int], Candidates]


class Grown(NamedTuple):
    tree: Tree
    read_index: Tensor  # (M,) the how-manieth node read each one was, -1 where it was not


def grow(first: Callable[[int], Candidates], expand: Expand, shape: TreeShape) -> Grown:
    """Draft a tree level by level. first: gives the root's `k` children, n = 1."""
    return (_grow_dynamic if shape.kind == "dynamic" else _grow_static)(first, expand, shape)


def _grow_static(first: Callable[[int], Candidates], expand: Expand, shape: TreeShape) -> Grown:
    """The best `children[d]` tokens behind every node at depth d."""
    children = shape.children or (1,) * shape.depth
    tokens = [first(children[0]).tokens.reshape(-1)]
    structure = _static_structure(children, tokens[0].device)
    for depth, (parent_rows, mask) in enumerate(structure.levels, start=1):
        tokens.append(expand(Level(tokens[-1], depth, parent_rows, mask), children[depth]).tokens.reshape(-1))
    tree = Tree(torch.cat(tokens), structure.parents, structure.depth, None, structure.mask)
    return Grown(tree, structure.read_index)


def _grow_dynamic(first: Callable[[int], Candidates], expand: Expand, shape: TreeShape) -> Grown:
    """EAGLE-2: of every level the `top_k` most probable nodes get `top_k` children each; the `total_tokens` most
    probable of all nodes stay. A node's probability is the product along its path, so never above its parent's:
    with ties given to the earlier node, what stays is a tree."""
    candidates = first(shape.top_k)
    tokens = [candidates.tokens[0]]  # per level (n * k,)
    scores = [candidates.logprobs[0].clamp_max(0)]
    parents = [torch.full_like(tokens[0], -1)]  # index among all candidates
    read_index = [torch.full_like(tokens[0], -1)]
    device = tokens[0].device
    num_before = num_read = 0  # candidates of the levels before this one; nodes read
    mask = torch.empty(1, 0, dtype=torch.bool, device=device)
    for depth in range(1, shape.depth):
        width = min(shape.top_k, len(tokens[-1]))
        best = scores[-1].topk(width).indices  # (n,) within the level
        # children of one parent stand together, the root's as well
        parent_rows = best // candidates.tokens.shape[1]
        mask = torch.cat((mask[parent_rows], torch.eye(width, dtype=torch.bool, device=device)), 1)
        read_index[-1][best] = torch.arange(num_read, num_read + width, device=device)
        num_read += width
        of_parents = scores[-1][best, None]  # (n, 1)
        candidates = expand(Level(tokens[-1][best], depth, parent_rows, mask), shape.top_k)  # (n, k)
        parents.append((num_before + best).repeat_interleave(candidates.tokens.shape[1]))
        num_before += len(tokens[-1])
        tokens.append(candidates.tokens.reshape(-1))
        scores.append((of_parents + candidates.logprobs.clamp_max(0)).reshape(-1))
        read_index.append(torch.full_like(tokens[-1], -1))
    all_scores = torch.cat(scores)  # (N,)
    kept = all_scores.argsort(descending=True, stable=True)[: shape.total_tokens].sort().values  # (M,)
    old_parents = torch.cat(parents)[kept]
    new_parents = torch.where(old_parents < 0, -1, torch.searchsorted(kept, old_parents))
    all_depths = torch.cat([torch.full_like(level, depth) for depth, level in enumerate(tokens, start=1)])
    tree = Tree(torch.cat(tokens)[kept], new_parents, all_depths[kept], scores=all_scores[kept])
    return Grown(tree, torch.cat(read_index)[kept])


class _StaticStructure(NamedTuple):
    parents: Tensor
    depth: Tensor
    mask: Tensor  # (M+1, M+1)
    levels: list[tuple[Tensor, Tensor]]  # parent_rows and mask of the levels that are expanded
    read_index: Tensor


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _static_structure(children: tuple[int, ...], device: torch.device) -> _StaticStructure:
    parents: list[Tensor] = []
    num_before, level = 0, torch.tensor([-1])  # nodes of the level above
    for num_children in children:
        parents.append(level.repeat_interleave(num_children))
        level = num_before + torch.arange(len(parents[-1]))
        num_before += len(level)
    sizes = torch.tensor([len(p) for p in parents])
    depth = torch.arange(1, len(children) + 1).repeat_interleave(sizes)
    tree = Tree(torch.zeros_like(depth), torch.cat(parents), depth)
    mask = tree_mask(tree)
    levels, start = [], 0
    for size in sizes[:-1].tolist():
        end = start + size
        rows = tree.parents[start:end] - tree.parents[start]
        levels.append((rows.to(device), mask[1 + start : 1 + end, 1 : 1 + end].to(device)))
        start = end
    read_index = torch.arange(len(depth)).where(depth < len(children), torch.tensor(-1))
    return _StaticStructure(tree.parents.to(device), depth.to(device), mask.to(device), levels, read_index.to(device))


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _chain_structure(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    depth = torch.arange(1, length + 1, device=device)
    return depth - 2, depth
