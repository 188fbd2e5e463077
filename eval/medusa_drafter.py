"""Medusa heads draft: one forward of them a round gives the distribution of every depth, for chains and trees alike.

Head d reads the target's final state of the token before the root and says what stands d places behind the root. It
does not know the tokens between, so all nodes of a depth have the same candidates. Verification is exact as for any
tree: the paper's typical acceptance (arXiv:2401.10774, section 2.3.1) would change what the target writes.
"""

import torch
from torch import Tensor

from eval.drafters import DRAFT_SAMPLING, Clock, best_token, best_tokens
from eval.tree import Candidates, Level, Tree, TreeShape, grow
from models.medusa import MedusaHeads
from models.sampling import SamplingParams, filtered_probs, sample


class MedusaDrafter:
    """Chains and trees of at most K levels; no cache, and no limit of positions.

    draft_sampling: for chains at temperature > 0, as in DraftModelChain: `probabilistic` draws every token from its
        head's own distribution over the draft vocabulary and declares it. Trees are grown as in DraftModelTree.
    """

    features = MedusaHeads.features

    def __init__(
        self,
        heads: MedusaHeads,
        shape: TreeShape,
        *,
        vocab_size: int,
        params: SamplingParams,
        draft_sampling: str = "probabilistic",
    ):
        assert draft_sampling in DRAFT_SAMPLING
        self.heads, self.shape, self.params, self.vocab_size = heads, shape, params, vocab_size
        self.is_one_hot = params.is_greedy or draft_sampling == "greedy" or shape.kind != "chain"

    def start(
        self, prompt: Tensor, *, features: Tensor, capacity: int, generator: torch.Generator, clock: Clock
    ) -> None:
        self.generator, self.clock = generator, clock
        self._state = features[-1:]  # (1, D) of the token before the root

    def max_draft_len(self, num_tokens: int) -> int:
        return self.heads.config.num_heads

    def propose(self, sequence: Tensor, depth: int) -> Tree:
        start = self.clock.now()
        logits = self.heads.logits(self.heads(self._state, num_heads=depth))[:, 0]  # (depth, Vd)
        self.clock.add("draft_forward", start)
        if self.shape.kind == "chain":
            return self._chain(logits)
        best = best_tokens(logits, max(*self.shape.children, self.shape.top_k, 1), self.params.temperature or 1.0)

        def candidates(depth: int, num_nodes: int, num_children: int) -> Candidates:
            tokens, logprobs = (x[depth, :num_children].expand(num_nodes, -1) for x in best)  # (n, k)
            return Candidates(self.heads.target_ids(tokens), logprobs)

        def expand(level: Level, num_children: int) -> Candidates:
            return candidates(level.depth, len(level.tokens), num_children)

        return grow(lambda num_children: candidates(0, 1, num_children), expand, self.shape.cut(depth)).tree

    def _chain(self, logits: Tensor) -> Tree:  # (K, Vd)
        if self.is_one_hot:
            return Tree.chain(self.heads.target_ids(best_token(logits)))
        probs = filtered_probs(logits, self.params)  # (K, Vd)
        tokens = self.heads.target_ids(sample(probs, self.generator))  # (K,)
        drawn_from = probs.new_zeros(len(probs), self.vocab_size)  # (K, V)
        drawn_from[:, self.heads.draft_vocab] = probs
        return Tree.chain(tokens, drawn_from)

    def accept(self, path: Tensor, next_token: int, features: Tensor) -> None:
        self._state = features[-1:]
