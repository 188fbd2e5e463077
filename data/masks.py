"""Which tokens of a chat the target would have emitted: the assistant's turns with their end-of-turn token.

1. Render the chat by the tokenizer's template (the template writes BOS; the tokenizer adds nothing).
2. Find each answer's characters: from the template's generation markers, where it has them and each marked run holds
   its answer once; otherwise render again with a sentinel in the answer's place and compare the two texts.
3. The end of turn is the special token that follows the answer, also when the chat stops there; a turn that was cut
   off (`finish_reason` = length) has none.
4. Tokens that overlap these spans are supervised; decoded, they must give back the answers.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from models.errors import UserError

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
SENTINEL = "\ue000\ue001"  # private-use characters: no template trims or looks for them
SLACK_CHARS = 16  # a token at a span's edge may reach this far into the template ("answer.\n\n" can be one token)


class Span(NamedTuple):
    """Characters of the rendered chat that one assistant turn supervises."""

    start: int
    end: int  # of the answer
    stop: int  # of its end-of-turn token; equal to `end` without one


def chat_row(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase, finish_reason: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Ids (T,) int32 and mask (T,) bool of one chat. See `chat_rows`."""
    return chat_rows([(messages, finish_reason)], tokenizer)[0]


def chat_rows(
    chats: Sequence[tuple[list[dict], str | None]], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and mask of each (messages, finish_reason); mask True on the assistant's turns and their end-of-turn token.

    finish_reason is the last turn's; a turn may carry its own key. "length" supervises no end-of-turn token. Raises
    UserError without a chat template, without an assistant turn, or where no span can be checked against its answer:
    a mask is never silently all ones or all zeros.
    """
    if not chats:
        return []
    if not tokenizer.chat_template:
        raise UserError(
            "the target's tokenizer has no chat template: take an instruct target, or sources with kind: text"
        )
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} gives no character offsets: chats need a fast tokenizer")
    special = _special_token_pattern(tokenizer)
    rendered = [_render_with_spans(messages, tokenizer, reason, special) for messages, reason in chats]
    encoded = tokenizer(
        [text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True,
        return_attention_mask=False, verbose=False,
    )  # fmt: skip
    rows = []
    for (text, spans), ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"]):
        offsets = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)  # (T, 2) first and last character + 1
        rows.append(_mask_spans(text, spans, np.asarray(ids, dtype=np.int32), offsets, tokenizer))
    return rows


def render_chat(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase, *, add_generation_prompt: bool = False
) -> str:
    """The chat as the template writes it; encode it with add_special_tokens=False, or BOS comes twice."""
    turns = [{key: value for key, value in message.items() if key != "finish_reason"} for message in messages]
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, KeyError) as error:
        roles = "/".join(str(message.get("role")) for message in messages[:6])
        raise UserError(
            f"the target's chat template refuses a chat with the turns {roles}: {_one_line(error)}"
        ) from error


def _render_with_spans(
    messages: list[dict], tokenizer: PreTrainedTokenizerBase, finish_reason: str | None, special: re.Pattern
) -> tuple[str, list[Span]]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise UserError(f"a chat has no assistant turn, so nothing to learn from: {_one_line(messages[0]['content'])}")
    text = render_chat(messages, tokenizer)
    answers = _marked_answers(messages, turns, text, tokenizer)
    spans, previous = [], 0
    for number, i in enumerate(turns):
        marked = render_chat([*messages[:i], messages[i] | {"content": SENTINEL}], tokenizer)
        if answers is None:
            start, end = _find_answer(messages, i, text, marked, tokenizer)
        else:
            start, end = answers[number]
        if start < previous:
            raise UserError(f"the chat template moves or merges turns: {_one_line(messages[i]['content'])}")
        reason = messages[i].get("finish_reason") or (finish_reason if i == len(messages) - 1 else None)
        stop = end if reason == "length" else _end_of_turn(text, end, marked, special)
        spans.append(Span(start, end, stop))
        previous = stop
    return text, spans


def _marked_answers(
    messages: list[dict], turns: list[int], text: str, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, int]] | None:
    """Answers inside the template's generation markers; None without markers, or where a marked run is not one turn
    with its answer in it exactly once (then the sentinel decides)."""
    if not GENERATION_MARKER.search(tokenizer.get_chat_template()):
        return None
    out = tokenizer.apply_chat_template(
        [{key: value for key, value in message.items() if key != "finish_reason"} for message in messages],
        return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"return_offsets_mapping": True},
    )  # fmt: skip
    mask, offsets = np.asarray(out["assistant_masks"], dtype=bool), np.asarray(out["offset_mapping"])  # (T,), (T, 2)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))  # a run is [first, last + 1)
    if len(edges) != 2 * len(turns):
        return None
    answers = []
    for i, first, last in zip(turns, edges[::2], edges[1::2]):
        begin, end = int(offsets[first, 0]), int(offsets[last - 1, 1])
        answer = messages[i]["content"]
        answer = answer if answer in text[begin:end] else answer.strip()  # some templates strip
        if not answer or text.count(answer, begin, end) != 1:
            return None
        start = text.index(answer, begin)
        answers.append((start, start + len(answer)))
    return answers


def _find_answer(
    messages: list[dict], i: int, text: str, marked: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int]:
    """Characters of turn i's answer: what differs once a sentinel stands in its place."""
    answer = messages[i]["content"]
    if i < len(messages) - 1:
        marked = render_chat([*messages[:i], messages[i] | {"content": SENTINEL}, *messages[i + 1 :]], tokenizer)
    if marked.count(SENTINEL) != 1:
        raise UserError(f"the chat template drops or repeats an assistant turn: {_one_line(answer)}")
    head, tail = marked.split(SENTINEL)
    start, end = len(head), len(text) - len(tail)
    if not (text.startswith(head) and text.endswith(tail) and start <= end):
        # The template writes something that depends on the answer (reasoning, say): keep what is the same around it.
        start = _common_prefix(head, text)
        end = len(text) - _common_prefix(tail[::-1], text[start:][::-1])
    found, wanted = _squeeze(text[start:end]), _squeeze(answer)
    if found not in wanted or bool(found) != bool(wanted):
        raise UserError(f"cannot find an answer in what the chat template renders: {_one_line(answer)}")
    return start, end


def _end_of_turn(text: str, end: int, marked: str, special: re.Pattern) -> int:
    """Where the end-of-turn token after an answer ends. Only what the template also writes when the chat stops at this
    turn counts: a next turn's header is no end of this one."""
    match = special.match(marked.rpartition(SENTINEL)[2])
    return end + len(match[0]) if match and text.startswith(match[0], end) else end


def _special_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern:
    """Matches space and one special or added token; longer ones first, so that none hides behind its own prefix."""
    tokens = {token for token in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if token.strip()}
    longest_first = [re.escape(token) for token in sorted(tokens, key=len, reverse=True)]
    return re.compile(rf"\s*(?:{'|'.join(longest_first) or '(?!)'})")  # (?!) never matches


def _mask_spans(
    text: str, spans: list[Span], ids: np.ndarray, offsets: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, np.ndarray]:
    """Mask (T,) of the tokens that overlap a span, each span checked by decoding what it supervises."""
    mask = np.zeros(len(ids), dtype=bool)
    for span in spans:
        inside = (offsets[:, 0] < span.stop) & (offsets[:, 1] > span.start)  # (T,)
        mask |= inside
        wanted = _squeeze(text[span.start : span.stop])
        if not _holds(tokenizer.decode(ids[inside]), wanted):
            # A tokenizer that normalises never gives the text back: then compare with its own version of the span.
            own = tokenizer(text[span.start : span.stop], add_special_tokens=False)["input_ids"]
            if not _holds(tokenizer.decode(ids[inside]), _squeeze(tokenizer.decode(own))):
                raise UserError(f"the supervised tokens do not decode to the answer: {_one_line(wanted)}")
    return ids, mask


def _common_prefix(first: str, second: str) -> int:
    """Length of what two texts have in common at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def _holds(decoded: str, wanted: str) -> bool:
    decoded = _squeeze(decoded)
    return wanted in decoded and len(decoded) - len(wanted) <= SLACK_CHARS


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _one_line(told: object) -> str:
    return " ".join(str(told).split())[:120]
