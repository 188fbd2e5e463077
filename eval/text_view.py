"""Generations to read on the terminal, the drafted tokens that the target accepted marked."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from eval.measures import Method, Trial
from eval.prompts import Prompt

OPEN, CLOSE = "⟦", "⟧"
LEGEND = f"{OPEN}drafted and accepted{CLOSE}; unmarked: the target's own (first, correction and bonus tokens)"


class TextView(NamedTuple):
    short: str  # one text per method
    full: str  # one per set and method


def text_view(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    trials: Mapping[Method, Sequence[Trial]],  # trials in the order of prompts
) -> TextView:
    """The first prompt of each set, decoded by each method."""
    short, full = [LEGEND], [LEGEND]
    for method, of_method in trials.items():
        first: dict[str, str] = {}
        for prompt, trial in zip(prompts, of_method):
            if trial.set_name not in first:
                first[trial.set_name] = (
                    f"--- {trial.set_name}/{trial.prompt_id}, T = {method.temperature:g}, {method.name}: "
                    f"{acceptance(method, trial)}\n> {printable(' '.join(prompt.text.split())[:300])}\n"
                    f"{printable(mark_accepted(tokenizer, trial.ours.token_ids, trial.ours.is_accepted))}\n"
                )
        short.append(next(iter(first.values())))
        full += first.values()
    return TextView("\n".join(short), "\n".join(full))


def acceptance(method: Method, trial: Trial) -> str:
    """tau of one text, and alpha where it is defined: a tree offers several tokens for one place."""
    tau = f"tau {trial.ours.tau:.2f}"
    return f"alpha {trial.ours.alpha:.2f}, {tau}" if method.shape.kind in ("chain", "ngram") else tau


def mark_accepted(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], is_accepted: Sequence[bool]) -> str:
    """The text with runs of accepted tokens between brackets."""
    pieces, inside = [], False
    for piece, accepted in zip(token_pieces(tokenizer, token_ids), is_accepted):
        if accepted != inside:
            pieces.append(OPEN if accepted else CLOSE)
            inside = accepted
        pieces.append(piece)
    return "".join([*pieces, CLOSE if inside else ""])


def token_pieces(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; joined they are the text. A character made of several tokens goes to the last
    of them, and the others add nothing."""
    pieces, written = [], ""
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:end])
        if end < len(token_ids) and text.endswith("\N{REPLACEMENT CHARACTER}"):
            pieces.append("")
        else:
            pieces.append(text[len(written) :])
            written = text
    return pieces


def printable(text: str) -> str:
    """Control characters as pictures (U+2400 ...): neither HTML nor XML may hold them, and a terminal obeys them.
    Newlines and tabs stay."""
    return "".join(map(_printable, text))


def _printable(char: str) -> str:
    code = ord(char)
    if char in "\n\t" or (0x20 <= code < 0x7F) or 0xA0 <= code < 0xD800:
        return char
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    is_invalid = code < 0xA0 or code < 0xE000 or (code & 0xFFFE) == 0xFFFE  # C1 controls, surrogates, no characters
    return "\N{REPLACEMENT CHARACTER}" if is_invalid else char
