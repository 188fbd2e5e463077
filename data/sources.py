"""Documents out of whatever the user has: text files, folders, globs, JSONL, chat JSONL, any `datasets` name.

A source is a plain dict. `path` (file, folder or glob; relative to the working folder, else to the repository) or
`dataset` (any name or folder that `datasets.load_dataset` takes, with `name`, `split`, `revision`, `streaming`), and
`kind`, `text_key`, `max_tokens`, `use`. Reading is lazy: a cap on tokens also caps what is read.
"""

import glob
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from models.errors import UserError
from models.hub import hub_reachable

REPO_ROOT = Path(__file__).resolve().parents[1]
DEFAULTS: dict[str, Any] = {
    "path": None, "dataset": None, "name": None, "split": "train", "revision": None, "streaming": False,
    "kind": "auto", "text_key": "text", "max_tokens": None, "use": "all",
}  # fmt: skip
DATASET_KEYS = ("name", "split", "revision", "streaming")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")  # what a folder is searched for, beside the JSON ones
BINARY_SUFFIXES = (".parquet", ".arrow", ".zst", ".zip", ".tar", ".xz", ".bz2", ".npy", ".bin", ".safetensors")
LONG_TEXT, PIECE = (
    1_000_000,
    64_000,
)  # characters: a longer text file becomes pieces, so that it can be split and capped


@dataclass(frozen=True)
class Document:
    """One text, or one chat (then `messages` is set); `origin` is file:line, for error messages."""

    origin: str
    text: str = ""
    messages: list[dict] | None = None
    finish_reason: str | None = None  # of the last turn
    is_complete: bool = True  # False for a piece of a long text that goes on: no EOS after it
    has_tools: bool = False  # a chat with tools on offer, or with calls of them

    @property
    def num_chars(self) -> int:
        return len(self.text) if self.messages is None else sum(len(m["content"]) for m in self.messages)

    def content(self) -> str:
        """What identifies the document: the text, or every turn of the chat."""
        return self.text if self.messages is None else _turns(self.messages)

    def split_content(self) -> str:
        """What decides its split: the text, or a chat's turns up to the first answer, so that several answers to one
        prompt (or new ones after a regeneration) stay on one side."""
        if self.messages is None:
            return self.text
        return _turns(list(itertools.takewhile(lambda m: m["role"] != "assistant", self.messages)) or self.messages)

    def hash(self) -> int:
        return xxhash.xxh3_64_intdigest(self.content().encode())

    def is_held_out(self, *, fraction: float, seed: int) -> bool:
        """Whether the hash of (content, seed), read as a number in [0, 1), falls under `fraction`: appending data never
        moves a document to the other side, and duplicates share a side."""
        digest = xxhash.xxh3_64_intdigest(self.split_content().encode(), seed=seed & (2**64 - 1))
        return digest < fraction * 2.0**64


def _turns(messages: list[dict]) -> str:
    return json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False)


def check_source(source: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The source with its defaults filled in. where: how messages call it, e.g. "data.sources[0]"."""
    if not isinstance(source, Mapping):
        raise UserError(f"{where}: {source!r} is not a mapping; write e.g. {{path: my.jsonl}}")
    unknown = sorted(set(source) - set(DEFAULTS))
    if unknown:
        raise UserError(f"{where}: unknown key {unknown[0]!r}; known keys are {', '.join(DEFAULTS)}")
    given = {key: value for key, value in source.items() if value is not None}
    full = DEFAULTS | given
    if ("path" in given) == ("dataset" in given):
        raise UserError(f"{where}: give exactly one of `path` and `dataset`")
    for key in DATASET_KEYS:
        if "path" in given and key in given:
            raise UserError(f"{where}.{key}={given[key]}: only for a source with `dataset`; this one has `path`")
    for key in ("path", "dataset", "name", "split", "revision", "text_key"):
        if full[key] is not None and (not isinstance(full[key], str) or not full[key]):
            raise UserError(f"{where}.{key}={full[key]!r}: must be a text")
    if not isinstance(full["streaming"], bool):
        raise UserError(f"{where}.streaming={full['streaming']}: must be true or false")
    for key, allowed in (("kind", ("text", "chat", "auto")), ("use", ("all", "train", "held_out"))):
        if full[key] not in allowed:
            raise UserError(f"{where}.{key}={full[key]}: use one of {', '.join(allowed)}")
    cap = full["max_tokens"]
    if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap <= 0):
        raise UserError(f"{where}.max_tokens={cap}: must be a positive whole number, or null for all")
    return full


def source_name(source: Mapping[str, Any]) -> str:
    return str(source["path"] or source["dataset"])


def read_source(source: Mapping[str, Any], where: str) -> Iterator[Document]:
    """Documents of a checked source, in order. Errors name the file and line."""
    if source["dataset"] is not None:
        yield from _read_dataset(source, where)
        return
    for path in source_files(source["path"], where):
        if _suffix(path) in JSON_SUFFIXES:
            for origin, row in read_json_lines(path):
                yield _to_document(row, source, origin)
        else:
            yield from _read_text(path, source)


def source_files(pattern: str, where: str) -> list[Path]:
    """Files of a path: itself, a folder's text and JSONL files (recursive, sorted, hidden ones left out), a glob's."""
    for root in (Path(), REPO_ROOT):
        path = root / Path(pattern).expanduser()
        if path.is_file():
            return [path]
        if path.is_dir():
            files = [f for f in sorted(path.rglob("*")) if f.is_file() and _is_listed(f, path)]
            if not files:
                known = ", ".join(TEXT_SUFFIXES + JSON_SUFFIXES)
                raise UserError(f"{where}.path={pattern}: no text in that folder ({known}, also .gz); name other files "
                                f"by a glob such as {pattern.rstrip('/')}/**/*.py")  # fmt: skip
            return files
        if glob.has_magic(pattern):
            files = sorted(Path(f) for f in glob.glob(str(path), recursive=True) if Path(f).is_file())
            if files:
                return files
    raise UserError(f"{where}.path={pattern}: no such file, folder or glob, from here or from the repository's folder")


def estimated_chars(source: Mapping[str, Any], where: str) -> int:
    """About how many characters a checked source holds, for progress bars only; 0 when unknown (a `datasets` name)."""
    if source["dataset"] is not None:
        return 0
    total = 0
    for path in source_files(source["path"], where):
        total += path.stat().st_size
        if path.suffix == ".gz" and path.stat().st_size > 4:
            with suppress(OSError), path.open("rb") as file:  # who reads it tells what is wrong with it
                file.seek(-4, 2)  # the last four bytes hold the size before compression, modulo 2^32
                total += max(int.from_bytes(file.read(4), "little") - path.stat().st_size, 0)
    return total


def _is_listed(path: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not is_hidden and _suffix(path) in TEXT_SUFFIXES + JSON_SUFFIXES


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


@contextmanager
def _opened(path: Path):
    """A UTF-8 reader of a plain or gzip file, told apart by their first bytes. What goes wrong while reading becomes
    one line naming the file."""
    if _suffix(path) in BINARY_SUFFIXES:
        raise UserError(f"{path}: not a text file; for Parquet or Arrow give the folder as `dataset`")
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with (gzip.open if is_gzip else open)(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start} of a block)") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error}); fetch or write it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read_text(path: Path, source: Mapping[str, Any]) -> Iterator[Document]:
    """A text file is one document; above LONG_TEXT it becomes pieces of PIECE, cut after a blank line or a line."""
    if source["kind"] == "chat":
        raise UserError(f'{path}: kind=chat needs JSONL lines {{"messages": [...]}}, this is a text file')
    with _opened(path) as file:
        text = file.read(LONG_TEXT)
        if len(text) < LONG_TEXT:
            if text:
                yield Document(str(path), text=clean(text))
            return
        while True:
            block = file.read(PIECE) if len(text) <= PIECE else ""
            text += block
            if len(text) <= PIECE and not block:
                break
            cut = max(text.rfind("\n\n", PIECE // 2, PIECE) + 2, PIECE // 2)
            if cut == PIECE // 2:
                cut = text.rfind("\n", PIECE // 2, PIECE) + 1 or PIECE
            if len(text) > cut:
                yield Document(str(path), text=clean(text[:cut]), is_complete=False)
                text = text[cut:]
        yield Document(str(path), text=clean(text))


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, value) of each line of a plain or gzip JSONL file that is not blank."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # besides JSONDecodeError: a number too long, lists too deep
                told = getattr(error, "msg", error)
                raise UserError(f"{path}:{number}: not valid JSON ({told}); each line is one object") from error
            yield f"{path}:{number}", row


def _read_dataset(source: Mapping[str, Any], where: str) -> Iterator[Document]:
    name = source["dataset"]
    is_local = Path(name).exists()
    if not is_local and (REPO_ROOT / name).is_dir():
        name, is_local = str(REPO_ROOT / name), True
    try:
        import datasets  # here, not above: half a second that most runs never need

        if not is_local and not hub_reachable():
            import huggingface_hub

            # An earlier download may still serve; without this the client would first retry for half a minute.
            datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
        keys = {key: source[key] for key in ("name", "split", "revision", "streaming")}
        for number, row in enumerate(datasets.load_dataset(name, **keys)):
            yield _to_document(row, source, f"{source['dataset']}[{number}]")
    except UserError:
        raise
    # `datasets` raises its own, the hub's and Arrow's errors here; a user can do nothing with their tracebacks.
    except Exception as error:
        told = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if not is_local and not hub_reachable():
            raise UserError(
                f"{where}.dataset={source['dataset']}: not a local folder, and the data hub is out of reach from this "
                "machine; check the network, or give `path` (the repository has data/sample/corpus/train.jsonl.gz)"
            ) from error
        raise UserError(f"{where}.dataset={source['dataset']}: `datasets` cannot read it: {told}") from error


def _to_document(row: Any, source: Mapping[str, Any], origin: str) -> Document:
    """A JSON row as a document: a chat where it has `messages` (or kind=chat), otherwise a text."""
    if not isinstance(row, Mapping):
        raise UserError(f'{origin}: expected an object such as {{"text": ...}}, got {type(row).__name__}')
    kind, key = source["kind"], source["text_key"]
    if kind == "auto":
        kind = "chat" if row.get("messages") is not None else "text"
    wanted = "messages" if kind == "chat" else key
    if row.get(wanted) is None:
        has = ", ".join(str(name) for name, value in row.items() if value is not None) or "nothing"
        hint = "" if kind == "chat" else "; text_key of the source names the text, `messages` makes a chat"
        raise UserError(f"{origin}: no key {wanted!r} (this row has {has}){hint}")
    if kind == "text":
        if not isinstance(row[key], str):
            raise UserError(f"{origin}: {key!r} must be a string, got {type(row[key]).__name__}")
        return Document(origin, text=clean(row[key]))
    messages = to_messages(row["messages"], origin)
    has_tools = bool(row.get("tools")) or any(message.get("tool_calls") for message in messages)
    return Document(origin, messages=messages, finish_reason=row.get("finish_reason"), has_tools=has_tools)


def to_messages(messages: Any, origin: str) -> list[dict]:
    """The turns of a chat, checked. Raises UserError with the origin."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{origin}: 'messages' must be a list of {{role, content}} with at least one turn")
    for number, message in enumerate(messages):
        is_turn = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_turn or not (isinstance(message.get("content"), str) or message.get("tool_calls")):
            raise UserError(f"{origin}: messages[{number}] needs the strings 'role' and 'content'")
    # A `datasets` table fills the keys that a row lacks with None; templates test for keys.
    return [{k: v for k, v in m.items() if v is not None} | {"content": clean(m["content"] or "")} for m in messages]


def clean(text: str) -> str:
    """The text with lone surrogates (JSON can hold them, UTF-8 and tokenizers cannot) replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
