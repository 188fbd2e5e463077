"""Prompts as the target reads them: first turns of the benchmark sets, files of prompts, prose to continue."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.masks import render_chat
from data.prompts import read_prompts
from data.sources import read_json_lines
from models.errors import UserError

SAMPLE = Path(__file__).parents[1] / "data" / "sample"
PROMPT_ROOT = SAMPLE / "eval_prompts"


@dataclass(frozen=True)
class Prompt:
    set_name: str
    prompt_id: str
    text: str  # the user's words
    token_ids: tuple[int, ...]  # with the chat template, where the target has one


def load_prompts(
    sets: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_prompts: int | None = None,
    root: Path = PROMPT_ROOT,
    group: str = "decode",
) -> list[Prompt]:
    """The first `num_prompts` questions of each set (None: all). A model without a chat template gets the raw text.

    Raises UserError, blaming the settings `sets` and `num_prompts` of `group`, for a set that is not there, or one
    without questions.
    """
    prompts = []
    for set_name in sets:
        path = root / set_name / "question.jsonl"
        if not path.is_file():
            known = ", ".join(sorted(folder.parent.name for folder in root.glob("*/question.jsonl")))
            raise UserError(f"{group}.sets={set_name}: no such set of prompts; there are: {known}")
        lines = [line for line in path.read_text().splitlines() if line.strip()][:num_prompts]
        if not lines:
            raise UserError(f"{group}.sets={set_name}, {group}.num_prompts={num_prompts}: no prompt left to decode")
        for line in lines:
            question = json.loads(line)
            text = question["turns"][0]
            ids = tuple(prompt_ids(text, tokenizer))
            prompts.append(Prompt(set_name, str(question["question_id"]), text, ids))
    return prompts


def prompt_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of a first turn, ready for the answer. The template writes its own special tokens: none is added twice."""
    if tokenizer.chat_template is None:
        return tokenizer(text)["input_ids"]
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(turn, add_special_tokens=False)["input_ids"]


def read_prompt_file(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """First turns of a JSONL of {"messages"}, {"prompt"} or {"text"} (a chat up to its first question), in the target's
    template; the set is named by the file. Raises UserError for a file that cannot be read, under the key `prompts`.
    """
    name, prompts = Path(path).name.split(".")[0], []
    for number, chat in enumerate(read_prompts(path, turns="first")):
        text = chat.messages[-1]["content"]
        if tokenizer.chat_template is None or len(chat.messages) == 1:
            ids = prompt_ids(text, tokenizer)
        else:
            rendered = render_chat(chat.messages, tokenizer, add_generation_prompt=True)
            ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        prompts.append(Prompt(name, str(number), text, tuple(ids)))
    return prompts


def load_prose(tokenizer: PreTrainedTokenizerBase, *, num_tokens: int, num_prompts: int | None = None) -> list[Prompt]:
    """The first `num_tokens` tokens of chunks of held-out novels, as they stand, without the chat template."""
    lines = read_json_lines(SAMPLE / "corpus" / "val.jsonl.gz")
    novels = ((origin, row["text"]) for origin, row in lines if row["source"].startswith("gutenberg"))
    prompts = []
    for origin, text in islice(novels, num_prompts):
        ids = tokenizer(text)["input_ids"][:num_tokens]
        prompts.append(Prompt("prose", origin.rpartition(":")[2], tokenizer.decode(ids), tuple(ids)))
    return prompts


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hash of the ids of all prompts, in order."""
    return hashlib.sha256(json.dumps([p.token_ids for p in prompts]).encode()).hexdigest()[:16]
