"""Generations to read, the drafted tokens that the target accepted marked."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from eval.measures import Trial
from eval.prompts import Prompt

OPEN, CLOSE = "⟦", "⟧"
LEGEND = f"{OPEN}drafted and accepted{CLOSE}; unmarked: the target's own (first, correction and bonus tokens)"


class TextView(NamedTuple):
    short: str  # one text per temperature and method
    full: str  # one per set, temperature and method


def text_view(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    trials: Mapping[tuple[float, str], Sequence[Trial]],  # trials in the order of prompts
) -> TextView:
    """The first prompt of each set, decoded by each method."""
    short, full = [LEGEND], [LEGEND]
    for (temperature, method), of_method in trials.items():
        first: dict[str, str] = {}
        for prompt, trial in zip(prompts, of_method):
            if trial.set_name not in first:
                ours = trial.ours
                first[trial.set_name] = (
                    f"--- {trial.set_name}/{trial.prompt_id}, T = {temperature:g}, {method}: "
                    f"alpha {ours.alpha:.2f}, tau {ours.tau:.2f}\n> {' '.join(prompt.text.split())[:300]}\n"
                    f"{mark_accepted(tokenizer, ours.token_ids, ours.is_accepted)}\n"
                )
        short.append(next(iter(first.values())))
        full += first.values()
    return TextView("\n".join(short), "\n".join(full))


def mark_accepted(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], is_accepted: Sequence[bool]) -> str:
    """The text with runs of accepted tokens between brackets. A character made of several tokens goes to the last."""
    pieces, written, inside = [], "", False
    for end, accepted in enumerate(is_accepted, start=1):
        if accepted != inside:
            pieces.append(OPEN if accepted else CLOSE)
            inside = accepted
        text = tokenizer.decode(token_ids[:end])
        if end == len(token_ids) or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            pieces.append(text[len(written) :])
            written = text
    return "".join([*pieces, CLOSE if inside else ""])
