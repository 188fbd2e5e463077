"""Prompts for a target to answer: the user's turns of chats, or single prompts, out of JSONL(.gz) files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.sources import REPO_ROOT, clean, read_json_lines, to_messages
from models.errors import UserError


@dataclass(frozen=True)
class ChatPrompt:
    messages: list[dict]  # system and user turns; each user turn wants an answer
    extra: dict[str, Any]  # what else the row carries (id, source, ...)
    origin: str = "prompts"  # file:line, for messages

    @property
    def user_turns(self) -> list[int]:
        """Where in `messages` they are."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]


def read_prompts(path: str | Path, *, turns: str = "all") -> list[ChatPrompt]:
    """Rows {"messages": [...]} (answers in them are left out: the target gives its own), {"prompt"} or {"text"}.

    turns: `all` keeps every user turn, `first` the chat up to the first one. Raises UserError naming file and line.
    """
    prompts = [_to_prompt(row, origin, turns) for origin, row in read_json_lines(prompts_file(path))]
    if not prompts:
        raise UserError(
            f'prompts={path}: the file holds no prompt; give lines of {{"messages": [...]}}, {{"prompt"}} or {{"text"}}'
        )
    return prompts


def prompts_file(path: str | Path) -> Path:
    """The file, from here or from the repository's folder."""
    places = [root / Path(path).expanduser() for root in (Path(), REPO_ROOT)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        what = "a folder" if any(place.is_dir() for place in places) else "no such file"
        raise UserError(f"prompts={path}: {what}; give a JSONL file of chats, prompts or texts")
    return found


def _to_prompt(row: Any, origin: str, turns: str) -> ChatPrompt:
    key = next((k for k in ("messages", "prompt", "text") if isinstance(row, Mapping) and row.get(k) is not None), None)
    if key is None:
        raise UserError(f'{origin}: expected an object with "messages", "prompt" or "text"')
    if row.get("tools"):
        raise UserError(f"{origin}: a chat with tools cannot be answered anew; leave such chats out")
    extra = {name: value for name, value in row.items() if name != key}
    if key != "messages":
        if not isinstance(row[key], str) or not row[key].strip():
            raise UserError(f"{origin}: {key!r} must be a text that is not empty")
        return ChatPrompt([{"role": "user", "content": clean(row[key])}], extra, origin)
    messages = [{"role": m["role"], "content": m["content"]} for m in to_messages(row["messages"], origin)]
    if unknown := sorted({m["role"] for m in messages} - {"system", "user", "assistant"}):
        raise UserError(f"{origin}: a turn of role {unknown[0]!r} cannot be answered anew; leave such chats out")
    messages = [m for m in messages if m["role"] != "assistant"]
    prompt = ChatPrompt(messages, extra, origin)
    if not prompt.user_turns:
        raise UserError(f"{origin}: no user turn to answer; add one, or leave the row out")
    last = prompt.user_turns[0 if turns == "first" else -1]
    return ChatPrompt(messages[: last + 1], extra, origin)
