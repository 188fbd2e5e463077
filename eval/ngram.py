"""Prompt lookup (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding): the text itself drafts, no model does.

    text     t[0 .. T-1], its last n tokens are looked for: t[T-n .. T-1] = t[e-n .. e-1] with e < T
    drafted  t[e], t[e+1], .. : what followed the latest such place; n is the longest of N, N-1, .. 1 that has one

Code, summaries and looping answers repeat their context, so that the copy is often right. The tokens are certain
(one-hot proposals), so verification is exact at any temperature.
"""

import torch
from torch import Tensor

from eval.drafters import Clock
from eval.tree import Tree, TreeShape


class NgramIndex:
    """Where each run of 1 .. n tokens was last followed by another token. Grows with the text, never reads it again."""

    def __init__(self, n: int):
        self.n = n
        self.tokens: list[int] = []
        self._last_end: dict[tuple[int, ...], int] = {}  # n-gram -> e

    def extend(self, tokens: list[int]) -> None:
        text = self.tokens
        for token in tokens:
            end = len(text)  # what ends here has something behind it now; the text's ending is never its own match
            for length in range(1, min(self.n, end) + 1):
                self._last_end[tuple(text[end - length :])] = end
            text.append(token)

    def continuation(self, count: int) -> list[int]:
        """The `count` tokens behind the latest earlier occurrence of the longest ending; [] without one.

        Where they reach the end of the text they go on into themselves: a text of period 2 is drafted whole.
        """
        for length in range(min(self.n, len(self.tokens)), 0, -1):
            end = self._last_end.get(tuple(self.tokens[-length:]))
            if end is not None:
                period = len(self.tokens) - end
                return [self.tokens[end + i % period] for i in range(count)]
        return []


class NgramDrafter:
    """Drafts chains by prompt lookup; without a match the round is a plain step."""

    features = None

    def __init__(self, shape: TreeShape):
        assert shape.kind == "ngram", shape
        self.shape = shape

    def start(
        self, prompt: Tensor, *, features: Tensor | None, capacity: int, generator: torch.Generator, clock: Clock
    ) -> None:
        self.index = NgramIndex(self.shape.ngram)
        self.index.extend(prompt.tolist())

    def max_draft_len(self, num_tokens: int) -> int:
        return self.shape.depth

    def propose(self, sequence: Tensor, depth: int) -> Tree:
        self.index.extend(sequence[len(self.index.tokens) :].tolist())
        drafted = self.index.continuation(depth)
        return Tree.chain(torch.tensor(drafted, dtype=torch.long, device=sequence.device))

    def accept(self, path: Tensor, next_token: int, features: Tensor | None) -> None:
        pass
