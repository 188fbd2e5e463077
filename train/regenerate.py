"""Let the target answer a file of prompts: `python -m train.regenerate +experiment=NAME prompts=FILE out=FILE`.

1. Read the prompts; `num_samples` chats of each, those that OUT.partial already holds left out.
2. Answer turn after turn in one batch that is kept full (models/generation.py); a finished chat is a line of the
   partial file.
3. Put the lines in the order of the prompts and move the whole file to OUT: a source {path: OUT, kind: chat}.
A chat depends on its prompt and seed alone, so a job that was killed and run again ends with the same bytes in fp32; in
bf16 a near tie may fall otherwise in another batch.
"""

import fcntl
import gzip
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from data.masks import chat_row, render_chat
from data.progress import ProgressBar
from data.prompts import ChatPrompt, prompts_file, read_prompts
from eval.entry import entry
from models.errors import UserError
from models.generation import Answer, Request, generate_rows
from models.sampling import SamplingParams
from models.target import Target

Key = tuple[int, int]  # number of the prompt in its file, number of the sample
OTHER_SHARE = 0.1  # of chats that may read otherwise: some templates cut blanks off an answer's ends
WARN_AFTER = 50  # chats: a template that changes answers is told while there is time to stop


def regenerate(
    target: Target,
    prompts: Sequence[ChatPrompt],
    out: str | Path,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    num_samples: int = 1,
    max_new_tokens: int = 160,
    max_prompt_tokens: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    overwrite: bool = False,
) -> Path:
    """Write the target's answers to `out` (JSONL, gzip if it ends in .gz), in the order of the prompts.

    A row is the prompt's row with `messages` (an answer behind each user turn), `finish_reason` of the last answer
    (stop or length; those of several stand in their messages), the row's `seed` and `sample`, `temperature` and the
    filters that are on, `max_new_tokens`, `target` and `target_fingerprint`.
    max_prompt_tokens: longer prompts are left out, as are those longer than the target's positions.
    Raises UserError: `out` exists, its partial file was begun with other settings, or no loss mask can be made of the
    answers (the partial file then stays).
    """
    out = Path(out)
    check_out(out, overwrite=overwrite)
    params = SamplingParams.of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if params.is_greedy and num_samples > 1:
        raise UserError(
            f"regenerate.num_samples={num_samples}: greedy answers are all the same; set a temperature above 0"
        )
    if not target.tokenizer.chat_template:
        raise UserError(f"target={target.name}: its tokenizer has no chat template; take an instruct target")
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    settings = {"temperature": temperature, **filters, "num_samples": num_samples, "max_new_tokens": max_new_tokens}
    settings |= {"max_prompt_tokens": max_prompt_tokens, "seed": seed}
    target_hash = _hash(target.fingerprint())
    about = {"temperature": temperature, **{k: v for k, v in filters.items() if params.has_filter and v not in (0, 1)}}
    about |= {"max_new_tokens": max_new_tokens, "target": target.name, "target_fingerprint": target_hash}

    begun_with = {"target": target_hash, "prompts": _hash([[p.messages, p.extra] for p in prompts]), **settings}
    with PartialFile(out.with_name(f"{out.name}.partial"), begun_with, overwrite=overwrite) as partial:
        longest = min(target.max_positions - 1, max_prompt_tokens or target.max_positions)
        chats: dict[Key, Chat] = {}
        num_too_long = 0
        for index, prompt in enumerate(prompts):
            check_turns(prompt, target)
            first_ids = Chat(prompt).prompt_ids(target)
            if len(first_ids) > longest:
                num_too_long += 1
                continue
            if not chats:
                check_answer(prompt, target)
            for sample in range(num_samples):
                chats[index, sample] = Chat(prompt, _row_seed(seed, index, sample), next_ids=first_ids)
        if not chats:
            fix = "raise regenerate.max_prompt_tokens" if longest == max_prompt_tokens else "the target reads no more"
            raise UserError(
                f"prompts: all {len(prompts):,} are longer than {longest:,} tokens; {fix}, or give shorter ones"
            )
        waiting = [chat.request(key, target, max_new_tokens) for key, chat in chats.items() if key not in partial.rows]
        waiting.sort(key=lambda request: len(request.prompt_ids))
        answers = generate_rows(
            target.model, waiting, params, batch_size=batch_size, eos_token_ids=target.eos_token_ids,
            vocab_size=target.vocab_size,
        )  # fmt: skip
        start, num_tokens, num_done = time.monotonic(), 0, len(chats) - len(waiting)
        with ProgressBar("regenerating", len(chats), "rows", done=num_done) as bar:
            for answer in answers:
                chat = chats[answer.key]
                chat.add(answer, target)
                num_tokens += len(answer.token_ids)
                if chat.can_go_on(target, longest):
                    waiting.append(chat.request(answer.key, target, max_new_tokens))
                    continue
                row = chat.row(about | {"sample": answer.key[1]}, target)
                partial.append(answer.key, row, is_other=chat.is_other_text)
                bar.advance(1)
                if len(partial.rows) == WARN_AFTER < len(chats):
                    warn_of_other(partial)
        rows = [partial.rows[key] for key in sorted(partial.rows)]
        seconds = max(time.monotonic() - start, 1e-9)
        unusable = sum(row is None for row in rows)
        rows = [row for row in rows if row is not None]
        if unusable and not rows:
            raise UserError(f"target={target.name}: its chat template gives back none of its {unusable:,} answers")
        _write_rows(out, rows)
        partial.path.unlink()
    stopped = sum(row["finish_reason"] == "stop" for row in rows) / max(len(rows), 1)
    print(
        f"regenerate: {out}: {len(rows):,} chats, {stopped:.0%} ended by themselves; {num_tokens:,} new tokens in "
        f"{seconds:.1f} s ({num_tokens / seconds:,.1f} tokens/s)"
        + (f"; {num_too_long:,} prompts left out, longer than {longest:,} tokens" if num_too_long else "")
        + (f"; {unusable:,} answers left out, the chat template does not give them back" if unusable else ""),
        flush=True,
    )
    warn_of_other(partial)
    return out


@dataclass
class Chat:
    """One sample of a prompt, as far as it is answered."""

    prompt: ChatPrompt
    seed: int = 0
    next_ids: list[int] | None = None  # ids of the prompt up to the next answer, once they are known
    answers: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    is_other_text: bool = False  # the row, as training will read it, differs from what the target read and answered
    told_ids: list[int] = field(default_factory=list)  # what the target read and answered last

    @property
    def is_complete(self) -> bool:
        return len(self.answers) == len(self.prompt.user_turns)

    def messages(self, *, with_next: bool) -> list[dict]:
        """The turns so far: up to the last answer, or to the user turn behind it."""
        turns, messages = self.prompt.user_turns, []
        last = turns[len(self.answers) - (not with_next)]
        for i, message in enumerate(self.prompt.messages[: last + 1]):
            messages.append(dict(message))
            number = turns.index(i) if i in turns else len(turns)
            if number < len(self.answers):
                messages.append({"role": "assistant", "content": self.answers[number]})
                if len(turns) > 1:
                    messages[-1]["finish_reason"] = self.reasons[number]
        return messages

    def prompt_ids(self, target: Target) -> list[int]:
        if self.next_ids is None:
            text = render_chat(self.messages(with_next=True), target.tokenizer, add_generation_prompt=True)
            self.next_ids = target.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self.next_ids

    def can_go_on(self, target: Target, longest: int) -> bool:
        """Whether a turn waits that the target can read: at most `longest` tokens with all before it."""
        if self.is_complete:
            return False
        try:
            return len(self.prompt_ids(target)) <= longest
        except UserError:  # the template refuses the last answer (an empty one, say), so `row` has no mask for it
            return False

    def request(self, key: Key, target: Target, max_new_tokens: int) -> Request:
        ids = self.prompt_ids(target)
        room = target.max_positions - len(ids)
        return Request(key, ids, min(max_new_tokens, room), seed=(self.seed, len(self.answers)))

    def add(self, answer: Answer, target: Target) -> None:
        ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        text = target.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if answer.finish_reason == "length":
            text = text.rstrip("\ufffd")  # a character whose last bytes were cut off
        self.told_ids = [*self.prompt_ids(target), *ids]
        self.answers.append(text)
        self.reasons.append(answer.finish_reason)
        self.next_ids = None

    def row(self, about: dict[str, Any], target: Target) -> dict[str, Any] | None:
        """The row of the file. None where no loss mask can be made of it, which would stop a training job later."""
        messages, reason = self.messages(with_next=False), self.reasons[-1]
        try:
            row_ids, _ = chat_row(messages, target.tokenizer, reason)
        except UserError:
            return None
        # not the ids: a text that was drawn in unusual tokens has the usual ones when it is read again
        row_text, told = (
            target.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (row_ids, self.told_ids)
        )
        self.is_other_text = not row_text.startswith(told.rstrip("\ufffd"))
        return self.prompt.extra | {"messages": messages, "finish_reason": reason, "seed": self.seed} | about


class PartialFile:
    """Finished rows in the order they came: a first line with the settings, then a line a row.

    A last line that was cut off is dropped. Opened with other settings it raises UserError naming the key
    (overwrite: begins anew instead). A lock keeps a second job out.
    """

    def __init__(self, path: Path, begun_with: dict[str, Any], *, overwrite: bool):
        self.path, self._begun_with = path, begun_with
        self.rows: dict[Key, dict | None] = {}
        self.num_other = 0  # rows that training will read otherwise than the target wrote them
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, however it ends
            self._resume(overwrite=overwrite)
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise UserError(f"out: another job is writing {path}; wait for it, or give another out") from error
            raise

    def _resume(self, *, overwrite: bool) -> None:
        self._file.seek(0)
        content = self._file.read()
        end = content.rfind(b"\n") + 1
        try:
            header, *lines = [json.loads(line) for line in content[:end].splitlines()] or [None]
            if header is not None and not overwrite:
                self._check(header)
            if header == self._begun_with:
                self.rows = {(line["prompt"], line["sample"]): line["row"] for line in lines}
                self.num_other = sum(line.get("is_other", False) for line in lines)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            if not overwrite:
                raise UserError(f"{self.path}: damaged; remove it, or begin anew by overwrite=true") from error
            header = None
        if header == self._begun_with:
            self._file.truncate(end)
        else:
            self._file.truncate(0)
            self._write(self._begun_with)

    def _check(self, header: dict[str, Any]) -> None:
        for key, value in self._begun_with.items():
            if header[key] != value:
                hint = "go on with that, give another out, or begin anew by overwrite=true"
                if key in ("target", "prompts"):
                    raise UserError(f"{key}: not the one that {self.path} was begun with; {hint}")
                shown, begun = (("null" if v is None else v) for v in (value, header[key]))
                raise UserError(f"regenerate.{key}={shown}: {self.path} was begun with {begun}; {hint}")

    def append(self, key: Key, row: dict | None, *, is_other: bool = False) -> None:
        self.rows[key] = row
        self.num_other += is_other
        self._write({"prompt": key[0], "sample": key[1], "is_other": is_other, "row": row})

    def _write(self, line: dict) -> None:
        self._file.write(_line(line))
        self._file.flush()

    def __enter__(self) -> "PartialFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def check_turns(prompt: ChatPrompt, target: Target) -> None:
    """Raises UserError naming file and line where the target's chat template refuses the turns of a prompt.

    All of them are rendered, with a word in each answer's place: a later turn must not stop the job after hours.
    """
    num_answers = len(prompt.user_turns) - 1
    chat = Chat(prompt, answers=["."] * num_answers, reasons=["stop"] * num_answers)
    try:
        render_chat(chat.messages(with_next=True), target.tokenizer, add_generation_prompt=True)
    except UserError as error:
        raise UserError(f"{prompt.origin}: {error}; leave such turns or the row out") from error


def check_answer(prompt: ChatPrompt, target: Target) -> None:
    """Raises UserError where no loss mask can be made of a plain answer to the first turn: of no other either, then."""
    first = prompt.messages[: prompt.user_turns[0] + 1]
    try:
        chat_row([*first, {"role": "assistant", "content": "An answer."}], target.tokenizer, "stop")
    except UserError as error:
        raise UserError(f"target={target.name}: its answers cannot be trained on: {error}") from error


def warn_of_other(partial: PartialFile) -> None:
    """Print a warning where the chat template changes answers."""
    if partial.num_other > OTHER_SHARE * len(partial.rows):
        print(
            f"warning: {partial.num_other:,} of {len(partial.rows):,} chats will read otherwise in training than the "
            "target wrote them: its chat template changes answers (reasoning that regenerate.max_new_tokens cuts off, "
            "perhaps)",
            flush=True,
        )


def check_out(out: str | Path, *, overwrite: bool) -> None:
    if Path(out).exists() and (Path(out).is_dir() or not overwrite):
        what = "is a folder; give a file" if Path(out).is_dir() else "is there already; give another, or overwrite=true"
        raise UserError(f"out={out}: {what}")


def _write_rows(out: Path, rows: Sequence[dict]) -> None:
    """The whole file or none of it."""
    content = b"".join(map(_line, rows))
    if out.suffix == ".gz":
        content = gzip.compress(content, mtime=0)  # the same rows, the same bytes
    temporary = out.with_name(f".{out.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, out)


def _line(value: dict) -> bytes:
    text = json.dumps(value, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # a lone surrogate stays what JSON writes for it


def _row_seed(seed: int, index: int, sample: int) -> int:
    return int(np.random.SeedSequence((seed, index, sample)).generate_state(1)[0])


def _hash(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())


@entry("regenerate")
def main(cfg: DictConfig) -> None:
    for key, example in (("prompts", "data/sample/prompts_train.jsonl.gz"), ("out", "my_chats.jsonl.gz")):
        if cfg[key] is None:
            raise UserError(f"{key}: not given; for example {key}={example}")
    settings = OmegaConf.to_container(cfg.regenerate, resolve=True)
    check_out(cfg.out, overwrite=cfg.overwrite)
    if Path(cfg.out).exists() and Path(cfg.out).samefile(prompts_file(cfg.prompts)):
        raise UserError(f"out={cfg.out}: is the file of prompts, which overwrite=true would replace; give another")
    prompts = read_prompts(cfg.prompts, turns=settings.pop("turns"))
    target: Target = instantiate(cfg.target)
    regenerate(target, prompts, cfg.out, overwrite=cfg.overwrite, **settings)


if __name__ == "__main__":
    main()
