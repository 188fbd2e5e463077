"""Rows from sources: splits, windows, caps, ids, and one clear line for every bad input."""

import gzip
import json
import socket
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors

from data.masks import render_chat
from data.rows import Rows, load_rows
from data.sources import LONG_TEXT, check_source, estimated_chars
from data.tokenise import window_bounds
from models.errors import UserError
from models.tiny import byte_tokenizer

END = 258  # the byte tokenizer's end of turn and EOS
SAMPLE = "data/sample"


def load(sources, tokenizer, **changes) -> Rows:
    keys = dict(split="train", max_length=16, held_out_fraction=0.0, seed=0) | changes
    return load_rows(sources, tokenizer, **keys)


def write_jsonl(path, rows) -> str:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def texts(num: int, start: int = 0) -> list[dict]:
    return [{"text": f"document {i} " + "ab" * (i % 40)} for i in range(start, start + num)]


def chat_line(question: str, answer: str, **extra) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **extra}


def documents(rows: Rows, tokenizer) -> list[str]:
    """The texts that went in: all tokens in order, cut at EOS."""
    assert rows.input_ids[-1] == END
    parts = np.split(rows.input_ids, np.flatnonzero(rows.input_ids == END) + 1)[:-1]
    return [tokenizer.decode(part[:-1]) for part in parts]


@pytest.mark.parametrize("size", range(2, 10))
def test_windows_hold_each_token_once(size):
    for length in range(1, 40):
        bounds = window_bounds(length, size)
        assert [i for begin, end in bounds for i in range(begin, end)] == list(range(length))
        assert all(0 < end - begin <= size for begin, end in bounds)
        if length > 1 and size > 2:
            assert all(end - begin > 1 for begin, end in bounds)


def test_text_rows_are_the_documents_with_one_eos_each(tokenizer, tmp_path):
    lines = [*texts(60), {"text": ""}, {"text": "naïve 東京 🙂"}]
    rows = load([{"path": write_jsonl(tmp_path / "a.jsonl.gz", lines)}], tokenizer)
    assert documents(rows, tokenizer) == [line["text"] for line in lines if line["text"]]
    lengths = np.diff(rows.row_offsets)
    assert lengths.max() == 16 and lengths.min() >= 2 and rows.num_tokens == lengths.sum() == len(rows.input_ids)
    assert rows.loss_mask.all() and rows.num_supervised == rows.num_tokens
    assert np.array_equal(np.concatenate([rows.row(i)[0] for i in range(len(rows))]), rows.input_ids)
    dtypes = (rows.input_ids.dtype, rows.loss_mask.dtype, rows.row_offsets.dtype, rows.row_ids.dtype)
    assert dtypes == (np.int32, np.bool_, np.int64, np.int64)


def test_eos_is_learned_when_it_is_also_the_pad(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    rows = load([{"path": write_jsonl(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "de"}])}], tokenizer)
    assert (rows.input_ids == END).sum() == 2 and rows.loss_mask[rows.input_ids == END].all()


def test_each_window_starts_with_one_bos_if_the_tokenizer_adds_it(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * 40}, {"text": "<|endoftext|>spelled out"}])
    rows = load([{"path": path}], tokenizer)
    starts = rows.row_offsets[:-1]
    assert (rows.input_ids[starts] == 256).all() and (rows.input_ids == 256).sum() == len(rows)
    assert not rows.loss_mask[starts].any() and rows.num_supervised == rows.num_tokens - len(rows)
    assert np.diff(rows.row_offsets).max() == 16
    body = rows.input_ids[rows.input_ids != 256]
    assert tokenizer.decode(body) == "x" * 40 + "<|im_end|>spelled out<|im_end|>"


def test_split_is_disjoint_complete_and_stable(tokenizer, tmp_path):
    def split_of(path, name, seed=0):
        rows = load([{"path": path}], tokenizer, split=name, held_out_fraction=0.2, seed=seed)
        return documents(rows, tokenizer), rows

    lines = texts(500)
    path = write_jsonl(tmp_path / "a.jsonl", lines)
    (train, train_rows), (held_out, held_out_rows) = split_of(path, "train"), split_of(path, "held_out")
    assert sorted(train + held_out) == sorted(line["text"] for line in lines)
    assert 60 < len(held_out) < 140  # 100 expected, standard deviation 9
    assert not set(train_rows.row_ids) & set(held_out_rows.row_ids)
    longer = write_jsonl(tmp_path / "b.jsonl", texts(300, start=500) + lines[::-1])
    more_train, more_held_out = split_of(longer, "train")[0], split_of(longer, "held_out")[0]
    assert set(train) <= set(more_train) and set(held_out) <= set(more_held_out)
    assert set(split_of(path, "held_out", seed=1)[0]) != set(held_out)


def test_answers_to_one_prompt_share_a_split(tokenizer, tmp_path):
    lines = [chat_line(f"question {i}", f"answer {i}{j}") for i in range(100) for j in range(2)]
    rows = load(
        [{"path": write_jsonl(tmp_path / "a.jsonl", lines)}],
        tokenizer,
        max_length=200,
        split="held_out",
        held_out_fraction=0.2,
    )
    held_out = [tokenizer.decode(rows.row(i)[0]).split("answer ")[1] for i in range(len(rows))]
    assert 10 < len(held_out) < 80 and len(held_out) % 2 == 0
    assert [a[:-11] for a in held_out[::2]] == [a[:-11] for a in held_out[1::2]]


def test_use_gives_a_source_to_one_split(tokenizer, tmp_path):
    a, b = write_jsonl(tmp_path / "a.jsonl", texts(20)), write_jsonl(tmp_path / "b.jsonl", texts(20, start=20))
    sources = [{"path": a, "use": "train"}, {"path": b, "use": "held_out"}]
    for fraction in (0.0, 0.5):
        train = load(sources, tokenizer, held_out_fraction=fraction)
        held_out = load(sources, tokenizer, split="held_out", held_out_fraction=fraction)
        assert documents(train, tokenizer) == [line["text"] for line in texts(20)]
        assert documents(held_out, tokenizer) == [line["text"] for line in texts(20, start=20)]


def test_caps_hold_share_and_stop_reading(tokenizer, tmp_path):
    lines = [{"text": "x" * 99}] * 20_000  # 100 tokens each
    big = write_jsonl(tmp_path / "big.jsonl", lines)
    with open(big, "a") as file:
        file.write("not JSON: reading this far would fail\n")
    small = write_jsonl(tmp_path / "small.jsonl", texts(20))
    num_small = load([{"path": small}], tokenizer).num_tokens
    rows = load([{"path": big, "max_tokens": 1000}, {"path": small}], tokenizer)
    assert 1000 - 16 < rows.num_tokens - num_small <= 1000
    rows = load([{"path": big}, {"path": small}], tokenizer, max_tokens=2000)
    assert 2000 - 16 < rows.num_tokens <= 2000
    assert set(load([{"path": small}], tokenizer).row_ids) <= set(rows.row_ids)  # the small source is not crowded out
    rows = load([{"path": big}, {"path": big}], tokenizer, max_tokens=2000)
    assert 2000 - 16 < rows.num_tokens <= 2000
    with pytest.raises(UserError, match=r"big.jsonl:20001: not valid JSON"):
        load([{"path": big}], tokenizer)


def test_row_ids_are_unique_and_depend_on_the_document_only(tokenizer, tmp_path):
    lines = texts(50)
    once = load([{"path": write_jsonl(tmp_path / "a.jsonl", lines)}], tokenizer)
    again = load([{"path": write_jsonl(tmp_path / "b.jsonl", lines * 3 + texts(10, start=900))}], tokenizer)
    assert len(set(once.row_ids)) == len(once) and len(set(again.row_ids)) == len(again)
    assert np.array_equal(once.row_ids, again.row_ids[: len(once)])
    assert (again.row_ids >= 0).all()


def test_chat_rows_are_cut_at_the_length_and_after_the_last_answer(tokenizer, tmp_path):
    lines = [
        chat_line("q", "short", finish_reason="stop"),
        chat_line("q", "cut off", finish_reason="length"),
        chat_line("q", "y" * 100),
        chat_line("z" * 100, "beyond max_length"),
        {"messages": [{"role": "user", "content": "nobody answers"}]},
    ]
    rows = load([{"path": write_jsonl(tmp_path / "a.jsonl", lines)}], tokenizer, max_length=64)
    texts = [tokenizer.decode(rows.row(i)[0]) for i in range(len(rows))]
    head = render_chat(lines[0]["messages"][:1], tokenizer, add_generation_prompt=True)
    assert texts[:2] == [head + "short<|im_end|>", head + "cut off"]
    assert len(rows) == 3 and len(rows.row(2)[0]) == 64 and texts[2].startswith(head + "yyy")
    learned = [tokenizer.decode(rows.row(i)[0][rows.row(i)[1]]) for i in range(2)]
    assert learned == ["short<|im_end|>", "cut off"]


def test_chats_with_tools_are_left_out_and_told(tokenizer, tmp_path, capsys):
    """Templates write calls beside the content, and the tools that there are above it: none of it is learned right."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    user = {"role": "user", "content": "1 + 1?"}
    lines = [
        chat_line("q", "plain"),
        {"messages": [user, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"messages": [user, {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}]},
        chat_line("q", "2") | {"tools": [{"name": "add"}]},
        {"messages": [user]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", lines)
    assert len(load([{"path": path}], tokenizer, max_length=64)) == 1
    told = capsys.readouterr().err
    assert "3 chats with tools left out" in told and "1 chats without an answer left out" in told
    with pytest.raises(UserError, match="nothing but chats with tools"):
        load([{"path": write_jsonl(tmp_path / "b.jsonl", lines[1:4])}], tokenizer, max_length=64)


def test_a_file_that_cannot_be_opened_is_no_matter_of_the_progress_bar(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl.gz", [chat_line("q", "a")])

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied")

    source = check_source({"path": path}, "data.sources[0]")
    monkeypatch.setattr(Path, "open", refuse)
    assert estimated_chars(source, "data.sources[0]") == Path(path).stat().st_size


def test_kinds_mix_in_one_file_in_order(tokenizer, tmp_path):
    lines = [{"text": "one"}, chat_line("q", "a"), {"text": "two"}]
    rows = load([{"path": write_jsonl(tmp_path / "a.jsonl", lines)}], tokenizer, max_length=64)
    assert [bool(rows.row(i)[1].all()) for i in range(3)] == [True, False, True]
    both = [{"text": "as text", **chat_line("q", "a")}]
    rows = load([{"path": write_jsonl(tmp_path / "b.jsonl", both), "kind": "text"}], tokenizer)
    assert documents(rows, tokenizer) == ["as text"]


def test_files_folders_and_globs(tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("from text")
    (folder / "deep" / "c.md").write_text("from markdown")
    (folder / "deep" / "d.py").write_text("from python")
    (folder / ".hidden.txt").write_text("hidden")
    write_jsonl(folder / "a.jsonl.gz", [{"body": "from jsonl"}])
    in_folder = load([{"path": str(folder), "text_key": "body"}], tokenizer)
    assert documents(in_folder, tokenizer) == ["from jsonl", "from text", "from markdown"]
    monkeypatch.chdir(tmp_path)
    assert documents(load([{"path": "folder/**/*.py"}], tokenizer), tokenizer) == ["from python"]
    # not in the working folder, so it is the repository's
    assert load([{"path": f"{SAMPLE}/corpus/val.jsonl.gz", "max_tokens": 1000}], tokenizer).num_tokens > 900


def test_a_long_text_file_is_one_text_in_pieces(tokenizer, tmp_path):
    paragraph = "All work and no play makes Jack a dull boy.\n" * 20 + "\n"
    text = paragraph * (LONG_TEXT // len(paragraph) + 100) + "z" * 150_000
    (tmp_path / "book.txt").write_text(text)
    rows = load([{"path": str(tmp_path / "book.txt")}], tokenizer, max_length=512)
    assert documents(rows, tokenizer) == [text]  # every character once, one EOS
    part = load(
        [{"path": str(tmp_path / "book.txt")}], tokenizer, max_length=512, split="held_out", held_out_fraction=0.3
    )
    assert 0 < part.num_tokens < rows.num_tokens


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_source(tokenizer, tmp_path, streaming):
    write_jsonl(tmp_path / "train.jsonl", texts(30))
    sources = [{"dataset": str(tmp_path), "streaming": streaming, "max_tokens": 300}]
    assert documents_start(load(sources, tokenizer), tokenizer, texts(30))


def documents_start(rows: Rows, tokenizer, lines) -> bool:
    whole = "".join(line["text"] + "<|im_end|>" for line in lines)
    return whole.startswith(tokenizer.decode(rows.input_ids)) and 280 < rows.num_tokens <= 300


def test_datasets_chats_with_keys_that_only_some_rows_have(tokenizer, tmp_path):
    lines = [chat_line("q", "a"), chat_line("q", "b", finish_reason="length")]
    lines[0]["messages"][1]["name"] = "bot"
    write_jsonl(tmp_path / "train.jsonl", lines)
    rows = load([{"dataset": str(tmp_path)}], tokenizer, max_length=64)
    learned = [tokenizer.decode(rows.row(i)[0][rows.row(i)[1]]) for i in range(2)]
    assert learned == ["a<|im_end|>", "b"]


def test_save_load_and_fingerprint(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", texts(20))
    rows = load([{"path": path}], tokenizer)
    rows.save(tmp_path / "rows" / "train.safetensors")
    assert [p.name for p in (tmp_path / "rows").iterdir()] == ["train.safetensors"]
    loaded = Rows.load(tmp_path / "rows" / "train.safetensors")
    assert loaded.fingerprint() == rows.fingerprint() == load([{"path": path}], tokenizer).fingerprint()
    assert loaded.loss_mask.dtype == bool and np.array_equal(loaded.input_ids, rows.input_ids)
    for key in ("input_ids", "loss_mask", "row_ids"):
        arrays = {name: getattr(rows, name).copy() for name in ("input_ids", "loss_mask", "row_offsets", "row_ids")}
        arrays[key][3] = ~arrays[key][3]
        assert Rows(**arrays).fingerprint() != rows.fingerprint()
    assert load([{"path": path}], tokenizer, max_length=8).fingerprint() != rows.fingerprint()
    (tmp_path / "broken").write_bytes(b"not rows")
    with pytest.raises(UserError, match="not a file of rows"):
        Rows.load(tmp_path / "broken")


FILES = {
    "good.jsonl": '{"text": "fine"}\n',
    "empty.jsonl": "\n",
    "empty.txt": "",
    "json.jsonl": '{"text": "fine"}\n\n{"text": \n',
    "key.jsonl": '{"text": "fine"}\n{"body": "x"}\n',
    "null.jsonl": '{"text": null}\n',
    "number.jsonl": '{"text": 3}\n',
    "list.jsonl": "[1, 2]\n",
    "roles.jsonl": '{"messages": [{"role": "user"}]}\n',
    "nothing.jsonl": '{"messages": []}\n',
    "prompts.jsonl": '{"messages": [{"role": "user", "content": "q"}]}\n',
    "plain.txt": "text",
    "data.parquet": "PAR1",
}


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"path": "missing.jsonl"}, r"sources\[0\].path=missing.jsonl: no such file"),
        ({"path": "empty.jsonl"}, "empty: no document in empty.jsonl"),
        ({"path": "empty.txt"}, "empty: no document in empty.txt"),
        ({"path": "json.jsonl"}, "json.jsonl:3: not valid JSON"),
        ({"path": "key.jsonl"}, r"key.jsonl:2: no key 'text' \(this row has body\)"),
        ({"path": "null.jsonl"}, "null.jsonl:1: no key 'text'"),
        ({"path": "number.jsonl"}, "number.jsonl:1: 'text' must be a string, got int"),
        ({"path": "list.jsonl"}, "list.jsonl:1: expected an object"),
        ({"path": "roles.jsonl"}, r"roles.jsonl:1: messages\[0\] needs"),
        ({"path": "nothing.jsonl"}, "nothing.jsonl:1: 'messages' must be a list"),
        ({"path": "prompts.jsonl"}, "has an assistant turn"),
        ({"path": "good.jsonl", "kind": "chat"}, "good.jsonl:1: no key 'messages'"),
        ({"path": "plain.txt", "kind": "chat"}, "plain.txt: kind=chat needs JSONL"),
        ({"path": "data.parquet"}, "data.parquet: not a text file"),
        ({"path": "damaged.txt.gz"}, "damaged.txt.gz: damaged gzip"),
        ({"path": "short.jsonl.gz"}, "short.jsonl.gz: damaged gzip"),
        ({"path": "latin.txt"}, "latin.txt: not UTF-8"),
        ({"path": "bare"}, "bare: no text in that folder"),
        ({"path": "good.jsonl", "use": "held_out"}, "no source serves the train split"),
        ({"path": "good.jsonl", "max_tokens": 3}, "fits in max_tokens"),
        ({"path": "good.jsonl", "max_tokens": 0}, "max_tokens=0"),
        ({"path": "good.jsonl", "max_token": 3}, "unknown key 'max_token'; known keys are path"),
        ({"path": "good.jsonl", "kind": "prose"}, "kind=prose: use one of text"),
        ({"path": "good.jsonl", "streaming": True}, "streaming=True: only for a source with `dataset`"),
        ({"path": "good.jsonl", "dataset": "x"}, "exactly one of"),
        ({"kind": "text"}, "exactly one of"),
        ({"path": 5}, r"sources\[0\].path=5: must be a text"),
        ({"path": ""}, r"sources\[0\].path='': must be a text"),
        ({"path": "good.jsonl", "text_key": 5}, "text_key=5: must be a text"),
        ({"dataset": "x", "streaming": "maybe"}, "streaming=maybe: must be true or false"),
        ({"dataset": "x", "streaming": True}, "a streaming source has no known end"),
        ("good.jsonl", "is not a mapping"),
    ],
)
def test_bad_sources_are_one_clear_line(tokenizer, tmp_path, monkeypatch, source, told):
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "damaged.txt.gz").write_bytes(gzip.compress(b"text")[:2] + b"not gzip")
    (tmp_path / "short.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fine"}\n' * 1000)[:-20])
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "bare").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=told) as caught:
        load([source], tokenizer)
    assert "\n" not in str(caught.value)


def test_bad_chats_name_their_line(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] != 'bad' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    path = write_jsonl(tmp_path / "a.jsonl", [chat_line("q", "good"), chat_line("q", "bad")])
    with pytest.raises(UserError, match=r"a.jsonl:2: "):
        load([{"path": path}], tokenizer)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"split": "test"}, "split=test"),
        ({"max_length": 1}, "data.max_length=1"),
        ({"held_out_fraction": 1.0}, "held_out_fraction=1.0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"split": "held_out"}, "falls in the held_out split"),
    ],
)
def test_bad_settings_are_one_clear_line(tokenizer, tmp_path, changes, told):
    path = write_jsonl(tmp_path / "a.jsonl", texts(5))
    with pytest.raises(UserError, match=told):
        load([{"path": path}], tokenizer, **changes)
    with pytest.raises(UserError, match="empty"):
        load([], tokenizer)


def test_hub_out_of_reach_is_one_clear_line(tokenizer, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(UserError, match=r"dataset=nobody/nothing: .*out of reach") as caught:
        load([{"dataset": "nobody/nothing"}], tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_real_tokenizer_masks_are_the_answers(smollm2, tmp_path):
    tokenizer = smollm2.tokenizer
    with gzip.open(f"{SAMPLE}/smollm2_chat.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(next(file)) for _ in range(50)]
    rows = load([{"path": write_jsonl(tmp_path / "a.jsonl", lines)}], tokenizer, max_length=2048)
    assert len(rows) == 50
    for i, line in enumerate(lines):
        ids, mask = rows.row(i)
        answer = line["messages"][1]["content"]
        end = "" if line["finish_reason"] == "length" else "<|im_end|>"
        assert tokenizer.decode(ids[mask]) == answer + end
        prompt = render_chat(line["messages"][:1], tokenizer, add_generation_prompt=True)
        assert tokenizer.decode(ids[~mask]) == prompt and not mask[: (~mask).sum()].any()
    assert {"length", "stop"} == {line["finish_reason"] for line in lines}
