"""Lookahead decoding (Fu et al. 2024, arXiv:2402.02057): the target guesses its own future while it decodes.

A window of N-1 rows and W columns of guessed tokens rides in every target forward. Row r, column j stands r + j places
behind the root; row 0, column 0 is the root itself. W = 4, N = 4:

    row 0   root   +1   +2   +3        sees row 0 up to its own column
    row 1    +1    +2   +3   +4        sees row 0 up to its column, and its column above it
    row 2    +2    +3   +4   +5
    read     +3    +4   +5   +6        what the target says behind row 2

Down a column stand N tokens, of which all but the first the target once said behind those above (Jacobi iteration):
the W n-grams of a round enter a pool. Then rows move up by one, and what was read becomes the last row: the root of
the next round, one place further, stands at row 0 again.

n-grams of the pool that begin with the root are drafted: up to G of them, N-1 tokens each, as one tree. They are
certain (one-hot proposals), so verification is exact at any temperature. The window is a guess only: it is
updated greedily at any temperature, and moves by one place whatever was accepted.
"""

from functools import lru_cache

import torch
from torch import Tensor

from eval.drafters import Clock, best_token
from eval.tree import Beside, Tree, TreeShape


class NgramPool:
    """For each first token the last `size` different continuations."""

    def __init__(self, size: int):
        self.size = size
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}  # oldest first

    def add(self, first: int, continuation: tuple[int, ...]) -> None:
        known = self._continuations.setdefault(first, {})
        known.pop(continuation, None)  # seen again: the newest
        known[continuation] = None
        if len(known) > self.size:
            del known[next(iter(known))]

    def newest_first(self, first: int) -> list[tuple[int, ...]]:
        return list(reversed(self._continuations.get(first, {})))


class LookaheadDrafter:
    """Drafts trees from the pool, and has the target read the window beside them."""

    features = None

    def __init__(self, shape: TreeShape):
        assert shape.kind == "lookahead", shape
        self.shape = shape

    def start(
        self, prompt: Tensor, *, features: Tensor | None, capacity: int, generator: torch.Generator, clock: Clock
    ) -> None:
        rows, columns = self.shape.depth, self.shape.window
        # tokens of the prompt are likelier than any others, and the target's own soon replace them
        chosen = torch.randint(len(prompt), (rows, columns), generator=generator, device=prompt.device)
        self.window: list[list[int]] = prompt[chosen].tolist()  # (N-1, W)
        self.pool = NgramPool(self.shape.pool)

    def max_draft_len(self, num_tokens: int) -> int:
        return self.shape.depth

    def propose(self, sequence: Tensor, depth: int) -> Tree:
        root = int(sequence[-1])
        self.window[0][0] = root
        nodes = merge([ngram[:depth] for ngram in self.pool.newest_first(root)])
        tokens, parents, depth_of = torch.tensor(nodes, dtype=torch.long, device=sequence.device)
        guessed = [token for row in self.window for token in row][1:]
        beside = Beside(
            torch.tensor(guessed, device=sequence.device),
            *window_structure(self.shape.depth, self.shape.window, sequence.device),
        )
        return Tree(tokens, parents, depth_of, beside=beside)

    def observe(self, logits: Tensor) -> None:  # (E, V) of the window, without the root
        read = best_token(logits[-self.shape.window :]).tolist()  # (W,) behind the last row
        for first, *continuation in zip(*self.window, read):
            self.pool.add(first, tuple(continuation))
        self.window = [*self.window[1:], read]

    def accept(self, path: Tensor, next_token: int, features: Tensor | None) -> None:
        pass


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def window_structure(num_rows: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places (E,) behind the root of the window without the root, and which of one another its tokens see (E, E)."""
    row, column = torch.meshgrid(torch.arange(num_rows), torch.arange(num_columns), indexing="ij")
    row, column = row.flatten()[1:], column.flatten()[1:]  # (E,)
    in_first_row = (row == 0) & (column <= column[:, None])
    in_own_column = (column == column[:, None]) & (row <= row[:, None])
    return (row + column).to(device), (in_first_row | in_own_column).to(device)


def merge(ngrams: list[tuple[int, ...]]) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and depths of the tree of all n-grams: a common beginning stands there once."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    node_of: dict[tuple[int, int], int] = {}  # parent, token -> node
    for ngram in ngrams:
        parent = -1
        for depth, token in enumerate(ngram, start=1):
            node = node_of.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
            parent = node
    return tokens, parents, depths
