"""The prompts that a deployment is tuned for: a benchmark set, `prose`, or a JSONL file of prompts."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eval.prompts import PROMPT_ROOT, Prompt, load_prompts, load_prose, read_prompt_file
from models.errors import UserError

PROSE, PROSE_TOKENS = "prose", 100


def read_workload(source: str, tokenizer: PreTrainedTokenizerBase, *, limit: int, max_tokens: int) -> list[Prompt]:
    """The first `limit` prompts of at most `max_tokens` tokens.

    source: `gsm8k` and the other sets of data/sample/eval_prompts; `prose`: the first 100 tokens of held-out chapters,
        to be continued as they stand, without a chat template; else a file of {"messages"}, {"prompt"} or {"text"} (the
        chat up to its first question, in the target's template).
    Raises UserError naming tune.prompts.
    """
    if source == PROSE:
        prompts = load_prose(tokenizer, num_tokens=PROSE_TOKENS)
    elif (PROMPT_ROOT / source / "question.jsonl").is_file():
        prompts = load_prompts([source], tokenizer)
    elif Path(source).suffix or Path(source).exists():
        prompts = _from_file(source, tokenizer)
    else:
        sets = ", ".join(sorted(folder.parent.name for folder in PROMPT_ROOT.glob("*/question.jsonl")))
        raise UserError(f"tune.prompts={source}: no such set or file; use {sets}, {PROSE} or a JSONL file of prompts")
    fitting = [prompt for prompt in prompts if 1 < len(prompt.token_ids) <= max_tokens]
    if not fitting:
        raise UserError(
            f"tune.prompts={source}: none of {len(prompts)} prompts has 2 to {max_tokens} tokens, which leave room for "
            "tune.max_new_tokens; give shorter prompts"
        )
    return fitting[:limit]


def _from_file(source: str, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    try:
        return read_prompt_file(source, tokenizer)
    except UserError as error:
        raise UserError(f"{'tune.' if str(error).startswith('prompts=') else ''}{error}") from None
