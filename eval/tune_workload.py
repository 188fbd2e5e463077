"""The prompts that a deployment is tuned for: a benchmark set, `prose`, or a JSONL file of prompts."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.masks import render_chat
from data.prompts import read_prompts
from data.sources import read_json_lines
from eval.prompts import PROMPT_ROOT, Prompt, load_prompts, prompt_ids
from models.errors import UserError

PROSE, PROSE_FILE, PROSE_TOKENS = "prose", Path(__file__).parents[1] / "data/sample/corpus/val.jsonl.gz", 100


def read_workload(source: str, tokenizer: PreTrainedTokenizerBase, *, limit: int, max_tokens: int) -> list[Prompt]:
    """The first `limit` prompts of at most `max_tokens` tokens.

    source: `gsm8k` and the other sets of data/sample/eval_prompts; `prose`: the first 100 tokens of held-out chapters,
        to be continued as they stand, without a chat template; else a file of {"messages"}, {"prompt"} or {"text"} (the
        chat up to its first question, in the target's template).
    Raises UserError naming tune.prompts.
    """
    if source == PROSE:
        prompts = _prose(tokenizer)
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


def _prose(tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    prompts = []
    for origin, row in read_json_lines(PROSE_FILE):
        if not row["source"].startswith("gutenberg"):  # code and documentation
            continue
        ids = tokenizer(row["text"][: 10 * PROSE_TOKENS])["input_ids"][:PROSE_TOKENS]
        prompts.append(Prompt(PROSE, origin.rpartition(":")[2], tokenizer.decode(ids), tuple(ids)))
    return prompts


def _from_file(source: str, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    name = Path(source).name.split(".")[0]
    prompts = []
    try:
        chats = read_prompts(source, turns="first")
    except UserError as error:
        raise UserError(f"{'tune.' if str(error).startswith('prompts=') else ''}{error}") from None
    for number, prompt in enumerate(chats):
        text = prompt.messages[-1]["content"]
        if tokenizer.chat_template is None or len(prompt.messages) == 1:
            ids = prompt_ids(text, tokenizer)
        else:
            rendered = render_chat(prompt.messages, tokenizer, add_generation_prompt=True)
            ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        prompts.append(Prompt(name, str(number), text, tuple(ids)))
    return prompts
