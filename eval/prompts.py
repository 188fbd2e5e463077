"""First-turn prompts of the benchmark sets in `data/sample/eval_prompts`, as the target reads them."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from models.errors import UserError

PROMPT_ROOT = Path(__file__).parents[1] / "data" / "sample" / "eval_prompts"


@dataclass(frozen=True)
class Prompt:
    set_name: str
    prompt_id: str
    text: str  # the user's words
    token_ids: tuple[int, ...]  # with the chat template, where the target has one


def load_prompts(
    sets: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, num_prompts: int | None = None, root: Path = PROMPT_ROOT
) -> list[Prompt]:
    """The first `num_prompts` questions of each set (None: all). A model without a chat template gets the raw text.

    Raises UserError for a set that is not there, or one without questions.
    """
    prompts = []
    for set_name in sets:
        path = root / set_name / "question.jsonl"
        if not path.is_file():
            known = ", ".join(sorted(folder.parent.name for folder in root.glob("*/question.jsonl")))
            raise UserError(f"decode.sets={set_name}: no such set of prompts; there are: {known}")
        lines = [line for line in path.read_text().splitlines() if line.strip()][:num_prompts]
        if not lines:
            raise UserError(f"decode.sets={set_name}, decode.num_prompts={num_prompts}: no prompt left to decode")
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


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hash of the ids of all prompts, in order."""
    return hashlib.sha256(json.dumps([p.token_ids for p in prompts]).encode()).hexdigest()[:16]
