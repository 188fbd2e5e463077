"""For the exactness tests of the loop: models over four ids whose joint distribution is known, and how often it draws
what."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2Config

from eval.drafters import Drafter
from eval.loop import decode
from eval.reference import joint_probs, reference_probs
from eval.tree import TreeShape
from models.sampling import SamplingParams

VOCAB = 4
PROMPT = [1, 2]


class SecondOrder(nn.Module):
    """A causal LM whose logits depend on the last two tokens. The one before last it takes from its cache: the last
    token written one position earlier, of those that the mask shows."""

    def __init__(self, table: Tensor):  # (V, V, V)
        super().__init__()
        self.table = table
        self.config = GPT2Config(n_layer=1, n_positions=64)
        self.config._attn_implementation = "sdpa"
        self.embedding = nn.Embedding(*table.shape[1:])
        self.device = torch.device("cpu")

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    get_output_embeddings = get_input_embeddings

    def forward(self, input_ids, *, cache, position_ids, attention_mask, use_cache, logits_to_keep):
        ids, positions = (x[:, None, :, None] for x in (input_ids, position_ids))  # (1, 1, T, 1)
        seen_ids, seen_at = (x[0, 0, :, 0] for x in cache.update(ids, positions, 0))  # (S,)
        is_before = seen_at == position_ids[0, :, None] - 1  # (T, S)
        if attention_mask is not None:
            is_before = is_before & attention_mask[0, 0]
        last = (is_before * torch.arange(1, len(seen_ids) + 1)).argmax(-1)  # (T,)
        before = torch.where(is_before.any(-1), seen_ids[last], input_ids[0])
        return type("Output", (), {"logits": self.table[before, input_ids[0]][None, -logits_to_keep:]})


def second_order_pair() -> tuple[SecondOrder, SecondOrder]:
    """A target and a draft that is often right."""
    generator = torch.Generator().manual_seed(4)
    target = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * 1.2
    draft = 0.6 * target + 0.8 * torch.randn(target.shape, generator=generator)
    return SecondOrder(target), SecondOrder(draft)


def loop_counts(
    target: nn.Module,
    drafter: Drafter,
    shape: TreeShape,
    params: SamplingParams,
    num_draws: int,
    *,
    num_tokens: int,
    vocab_size: int = VOCAB,
) -> np.ndarray:  # (V^n,)
    """Counts of the n tokens behind the prompt. All but the first come out of rounds."""
    counts = np.zeros((vocab_size,) * num_tokens)
    prompt, generator = torch.tensor(PROMPT), torch.Generator().manual_seed(0)
    for _ in range(num_draws):
        result = decode(
            target, drafter, prompt, params=params, vocab_size=vocab_size, shape=shape,
            max_new_tokens=num_tokens, eos_token_ids=frozenset(), generator=generator,
        )  # fmt: skip
        counts[tuple(result.token_ids)] += 1
    return counts.reshape(-1)


def exact_probs(target: SecondOrder, filters: Mapping[str, float], *, num_tokens: int) -> np.ndarray:  # (V^n,)
    """Chance of each outcome of `loop_counts`."""

    def probs(prefix: tuple[int, ...]) -> np.ndarray:  # (V,)
        before, last = (*PROMPT, *prefix)[-2:]
        return reference_probs(target.table[before, last].numpy(), **filters)

    return joint_probs(probs, num_tokens, VOCAB).reshape(-1)
