"""Regenerated chats: the pipeline takes them, their masks hold exactly the answers, a killed job ends the same."""

import gzip
import json
import sys
from pathlib import Path

import pytest

import train.regenerate
from data.masks import render_chat
from data.prompts import ChatPrompt, read_prompts
from data.rows import load_rows
from models.errors import UserError
from models.generation import Answer
from models.sampling import SamplingParams, generate
from train.regenerate import Chat, PartialFile, regenerate

USER = {"role": "user", "content": "What is rain?"}
PROMPTS = [
    {"id": 7, "source": "a", "messages": [USER]},
    {"id": 8, "prompt": "Count to ten, slowly and aloud, then backwards."},
    {"id": 9, "text": "Hi"},
    {"id": 10, "messages": [{"role": "system", "content": "Be brief."}, USER]},
    {"id": 11, "messages": [USER, {"role": "assistant", "content": "OLD"}, {"role": "user", "content": "b?"}]},
    {"id": 12, "messages": [{"role": "user", "content": "Name a river."}]},
]
SAMPLED = {"temperature": 1.2, "top_p": 0.95, "max_new_tokens": 40, "batch_size": 3, "seed": 1}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return read_prompts(path)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(row: dict) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def test_the_pipeline_takes_the_file_and_supervises_exactly_the_answers(tiny_target, prompts, tmp_path):
    out = regenerate(tiny_target, prompts, tmp_path / "out.jsonl", num_samples=4, **SAMPLED | {"batch_size": 24})
    written, tokenizer = lines(out), tiny_target.tokenizer
    assert {row["finish_reason"] for row in written} == {"stop", "length"}
    source = {"path": str(out), "kind": "chat"}
    rows = load_rows([source], tokenizer, split="train", max_length=1024, held_out_fraction=0.0, seed=0)
    assert len(rows) == len(written) == 4 * len(PROMPTS)
    for i, row in enumerate(written):
        ids, mask = rows.row(i)
        reasons = [m.get("finish_reason", row["finish_reason"]) for m in row["messages"] if m["role"] == "assistant"]
        wanted = [a + ("<|im_end|>" if reason == "stop" else "") for a, reason in zip(answers(row), reasons)]
        assert tokenizer.decode(ids[mask]) == "".join(wanted)


def test_a_template_that_changes_answers_is_noticed(tiny_target, monkeypatch, tmp_path, capsys):
    """Templates of reasoning targets drop what stands before </think>: training would read a text that nobody wrote."""
    ids = tiny_target.tokenizer("Hm.</think>Yes.")["input_ids"]
    answer = Answer((0, 0), [*ids, tiny_target.eos_token_ids[0]], "stop")
    prompt = ChatPrompt([USER], {})
    (plain := Chat(prompt)).add(answer, tiny_target)
    assert plain.row({}, tiny_target) is not None and not plain.is_other_text
    template = tiny_target.tokenizer.chat_template
    changed = template.replace("message['content']", "message['content'].split('</think>')[-1]")
    changed = changed.replace("message.content", "message.content.split('</think>')[-1]")
    assert changed != template
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", changed)
    (other := Chat(prompt)).add(answer, tiny_target)
    assert other.row({}, tiny_target) is not None and other.is_other_text
    monkeypatch.setattr(train.regenerate, "generate_rows", lambda *_, **__: [answer])
    regenerate(tiny_target, [prompt], tmp_path / "out.jsonl")
    assert "warning: 1 of 1 chats will read otherwise" in capsys.readouterr().out


@pytest.mark.slow
def test_a_text_drawn_in_unusual_tokens_is_no_other_text(smollm2):
    """A quarter of sampled answers have some: read again, they have the tokenizer's own."""
    tokenizer = smollm2.tokenizer
    parts = [tokenizer(part)["input_ids"] for part in (" Ah", "m", "os", ".\n", "\n", "2")]
    drawn = [token for part in parts for token in part]
    assert drawn != tokenizer(" Ahmos.\n\n2")["input_ids"]
    for ids, reason in (([*drawn, smollm2.eos_token_ids[0]], "stop"), (drawn, "length")):
        (chat := Chat(ChatPrompt([USER], {}))).add(Answer((0, 0), ids, reason), smollm2)
        assert chat.row({}, smollm2) is not None and not chat.is_other_text


def test_a_template_that_changes_answers_is_told_early_and_after_a_resume(
    tiny_target, prompts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(train.regenerate, "WARN_AFTER", 2)
    asked, rows_of = [], train.regenerate.generate_rows

    def stopping(model, waiting, *args, **kwargs):
        asked.append(len(waiting))
        for number, answer in enumerate(rows_of(model, waiting, *args, **kwargs)):
            if len(asked) == 1 and number == 3:
                assert "warning: 2 of 2 chats will read otherwise" in capsys.readouterr().out
                raise KeyboardInterrupt
            yield answer

    row_of = Chat.row

    def other_row(chat, about, target):
        row = row_of(chat, about, target)
        chat.is_other_text = len(asked) == 1
        return row

    monkeypatch.setattr(Chat, "row", other_row)
    monkeypatch.setattr(train.regenerate, "generate_rows", stopping)
    with pytest.raises(KeyboardInterrupt):
        regenerate(tiny_target, prompts[:4], tmp_path / "out.jsonl", max_new_tokens=8)
    regenerate(tiny_target, prompts[:4], tmp_path / "out.jsonl", max_new_tokens=8)
    num_done = 4 - asked[1]
    assert f"warning: {num_done} of 4 chats will read otherwise" in capsys.readouterr().out


def test_a_chat_whose_template_refuses_an_answer_does_not_stop_the_others(
    tiny_target, prompts, tmp_path, monkeypatch, capsys
):
    """Mistral's refuses an empty one: the same seed would give it again at every resume."""
    template = tiny_target.tokenizer.chat_template
    refusing = "{% for m in messages %}{% if m['content'] == '' %}{{ raise_exception('empty') }}{% endif %}{% endfor %}"
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", refusing + template)
    end = tiny_target.eos_token_ids[0]

    def answers_of(model, waiting, *args, **kwargs):
        while waiting:
            request = waiting.pop()
            ids = tiny_target.tokenizer("Yes.")["input_ids"] if request.key != (4, 0) else []
            yield Answer(request.key, [*ids, end], "stop")

    monkeypatch.setattr(train.regenerate, "generate_rows", answers_of)
    out = regenerate(tiny_target, prompts, tmp_path / "out.jsonl")
    assert [row["id"] for row in lines(out)] == [p["id"] for p in PROMPTS if p["id"] != 11]
    assert "1 answers left out" in capsys.readouterr().out
    monkeypatch.setattr(Chat, "row", lambda *_: None)
    with pytest.raises(UserError, match=f"target={tiny_target.name}: .* none of its"):
        regenerate(tiny_target, prompts, tmp_path / "none.jsonl")
    assert (tmp_path / "none.jsonl.partial").exists()


def test_prompts_with_tools_are_refused(tmp_path):
    """Their answers would be made without the tools, and left out of the training rows afterwards."""
    path = tmp_path / "tools.jsonl"
    path.write_text(json.dumps({"messages": [USER], "tools": [{"name": "f"}]}) + "\n")
    with pytest.raises(UserError, match=r"tools\.jsonl:1: a chat with tools"):
        read_prompts(path)


def test_a_target_whose_answers_give_no_mask_is_refused_before_it_answers(tiny_target, prompts, tmp_path, monkeypatch):
    """Else hours of answers would end in an empty file."""
    template = tiny_target.tokenizer.chat_template
    changed = template.replace(
        "message['content']", "message['content'] | upper if message['role'] == 'assistant' else ''"
    )
    changed = changed.replace("message.content", "message.content | upper if message.role == 'assistant' else ''")
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", changed)
    monkeypatch.setattr(train.regenerate, "generate_rows", lambda *_, **__: pytest.fail("nothing may be answered"))
    with pytest.raises(UserError, match=f"target={tiny_target.name}: its answers cannot be trained on"):
        regenerate(tiny_target, prompts, tmp_path / "out.jsonl")


def test_rows_carry_what_made_them(tiny_target, prompts, tmp_path):
    out = regenerate(tiny_target, prompts, tmp_path / "out.jsonl", num_samples=2, **SAMPLED)
    written = lines(out)
    assert [(row["id"], row["sample"]) for row in written] == [(p["id"], s) for p in PROMPTS for s in (0, 1)]
    assert written[0]["source"] == "a"
    assert len({row["seed"] for row in written}) == len(written)
    assert len({answers(row)[0] for row in written}) == len(written)
    hashes = {(row["target"], row["target_fingerprint"]) for row in written}
    assert len(hashes) == 1 and hashes.pop()[0] == tiny_target.name
    about = {"temperature": 1.2, "top_p": 0.95, "max_new_tokens": 40}
    assert all(row.items() >= about.items() and "top_k" not in row and "prompt" not in row for row in written)
    assert written[6]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_greedy_rows_are_the_targets_plain_greedy_text(tiny_target, prompts, tmp_path):
    """Turn by turn, each prompt rendered with the answers before it."""
    out = regenerate(tiny_target, prompts, tmp_path / "out.jsonl", max_new_tokens=24)
    for row in lines(out):
        for i, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                text = render_chat(row["messages"][:i], tiny_target.tokenizer, add_generation_prompt=True)
                ids = tiny_target.tokenizer(text, add_special_tokens=False)["input_ids"]
                ends = tiny_target.eos_token_ids
                [plain] = generate(
                    tiny_target.model, [ids], SamplingParams(), max_new_tokens=24, eos_token_ids=ends
                )  # fmt: skip
                plain = [token for token in plain if token not in ends]
                text = tiny_target.tokenizer.decode(plain, skip_special_tokens=True)
                assert message["content"].rstrip("\ufffd") == text.rstrip("\ufffd")


def test_every_user_turn_is_answered_in_sequence(tiny_target, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(PROMPTS[4]) + "\n")
    [row] = lines(regenerate(tiny_target, read_prompts(path), tmp_path / "all.jsonl", **SAMPLED))
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "user", "assistant"]
    assert "OLD" not in answers(row) and [m["content"] for m in row["messages"][::2]] == ["What is rain?", "b?"]
    assert row["messages"][-1]["finish_reason"] == row["finish_reason"]
    first = read_prompts(path, turns="first")
    [row] = lines(regenerate(tiny_target, first, tmp_path / "first.jsonl", **SAMPLED))
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] and row["messages"][0] == USER


@pytest.mark.parametrize("num_rows", [0, 1, 4, 6])
def test_an_interrupted_job_ends_with_the_same_bytes(num_rows, tiny_target, prompts, tmp_path, monkeypatch):
    whole = regenerate(tiny_target, prompts, tmp_path / "whole.jsonl.gz", **SAMPLED)
    assert len(gzip.decompress(whole.read_bytes()).splitlines()) == len(PROMPTS)
    out, partial = tmp_path / "out.jsonl.gz", tmp_path / "out.jsonl.gz.partial"
    asked: list[int] = []
    rows_of = train.regenerate.generate_rows

    def stopping(model, waiting, *args, **kwargs):
        asked.append(len(waiting))
        for answer in rows_of(model, waiting, *args, **kwargs):
            if len(asked) == 1 and len(partial.read_bytes().splitlines()) > num_rows:
                raise KeyboardInterrupt
            yield answer
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(train.regenerate, "generate_rows", stopping)
    with pytest.raises(KeyboardInterrupt):
        regenerate(tiny_target, prompts, out, **SAMPLED)
    assert not out.exists()
    with partial.open("ab") as file:
        file.write(b'{"prompt": 3, "sample": 0, "row": {"id": 10, "mess')
    regenerate(tiny_target, prompts, out, **SAMPLED)
    assert out.read_bytes() == whole.read_bytes() and not partial.exists()
    assert asked == [len(PROMPTS), len(PROMPTS) - num_rows]


def test_batch_size_changes_nothing(tiny_target, prompts, tmp_path):
    one = regenerate(tiny_target, prompts, tmp_path / "one.jsonl", **SAMPLED | {"batch_size": 1})
    eight = regenerate(tiny_target, prompts, tmp_path / "eight.jsonl", **SAMPLED | {"batch_size": 8})
    assert one.read_bytes() == eight.read_bytes()
    other = regenerate(tiny_target, prompts, tmp_path / "other.jsonl", **SAMPLED | {"seed": 2})
    assert one.read_bytes() != other.read_bytes()


def test_an_answer_cut_by_length_supervises_no_end_of_turn(tiny_target, prompts, tmp_path):
    out = regenerate(tiny_target, prompts[:1], tmp_path / "out.jsonl", max_new_tokens=3)
    [row] = lines(out)
    assert row["finish_reason"] == "length"
    source = {"path": str(out), "kind": "chat"}
    rows = load_rows([source], tiny_target.tokenizer, split="train", max_length=512, held_out_fraction=0.0, seed=0)
    ids, mask = rows.row(0)
    assert 258 not in ids[mask]


def test_prompts_too_long_are_left_out_and_counted(tiny_gpt2_target, tmp_path, capsys):
    """256 positions: a prompt of 300 bytes goes, one of 200 is answered up to the last position, a chat ends early."""
    rows = [{"text": "x" * 300}, {"text": "y" * 200}, {"text": "z"}]
    rows.append({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b" * 300}]})
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = regenerate(tiny_gpt2_target, read_prompts(path), tmp_path / "out.jsonl", max_new_tokens=60)
    written = lines(out)
    assert [row["messages"][0]["content"][0] for row in written] == ["y", "z", "a"]
    assert len(written[2]["messages"]) == 2
    assert "1 prompts left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="all 4 are longer than 3 tokens"):
        regenerate(tiny_gpt2_target, read_prompts(path), tmp_path / "none.jsonl", max_prompt_tokens=3)


def test_other_settings_are_refused_and_overwrite_begins_anew(tiny_target, prompts, tmp_path, monkeypatch):
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    expected = regenerate(tiny_target, prompts, tmp_path / "expected.jsonl", **SAMPLED | {"top_p": 0.5})
    monkeypatch.setattr(train.regenerate, "generate_rows", lambda *a, **k: iter(()))
    monkeypatch.setattr(train.regenerate, "_write_rows", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        regenerate(tiny_target, prompts, out, **SAMPLED)
    monkeypatch.undo()
    begun = partial.read_bytes()
    for change in ({"temperature": 1.0}, {"num_samples": 2}, {"top_p": 0.5}, {"seed": 3}, {"max_new_tokens": 41}):
        [(key, value)] = change.items()
        with pytest.raises(UserError, match=rf"^regenerate\.{key}={value}: .* begun with {SAMPLED.get(key, 1)}; "):
            regenerate(tiny_target, prompts, out, **SAMPLED | change)
    with pytest.raises(UserError, match=r"^prompts: not the one"):
        regenerate(tiny_target, prompts[1:], out, **SAMPLED)
    assert partial.read_bytes() == begun
    regenerate(tiny_target, prompts, out, **SAMPLED | {"top_p": 0.5}, overwrite=True)
    assert out.read_bytes() == expected.read_bytes()


def test_a_damaged_or_locked_partial_file_is_told(tmp_path):
    path = tmp_path / "out.partial"
    with PartialFile(path, {"seed": 1}, overwrite=False) as file:
        file.append((0, 0), {"a": 1})
        with pytest.raises(UserError, match="another job is writing"):
            PartialFile(path, {"seed": 1}, overwrite=False)
    path.write_bytes(path.read_bytes() + b"garbage\n")
    with pytest.raises(UserError, match="damaged"):
        PartialFile(path, {"seed": 1}, overwrite=False)
    with PartialFile(path, {"seed": 1}, overwrite=True) as file:
        assert file.rows == {}


def test_the_command_line(tmp_path, monkeypatch, capsys):
    path, out = tmp_path / "prompts.jsonl.gz", tmp_path / "new" / "chats.jsonl"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in PROMPTS).encode()))
    common = [
        "+experiment=smoke", f"output_root={tmp_path}", f"prompts={path}", f"out={out}", "regenerate.max_new_tokens=4"
    ]  # fmt: skip

    def run(*overrides: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["regenerate", *common, *overrides])
        code = 0
        try:
            train.regenerate.main()
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr().err

    assert run()[0] == 0 and len(lines(out)) == len(PROMPTS)
    before = out.read_bytes()
    for overrides, told in {
        (): f"error: out={out}: is there already",
        ("out=null",): "error: out: not given",
        ("prompts=no/such.jsonl", "overwrite=true"): "error: prompts=no/such.jsonl: no such file",
        ("regenerate.turns=last",): "error: regenerate.turns=last: must be all or first",
        ("regenerate.temperature=-1",): "error: regenerate.temperature=-1: must be",
        ("regenerate.batch_size=0",): "error: regenerate.batch_size=0: must be",
        ("overwrite=true", "regenerate.temperature=0", "regenerate.num_samples=2"): "error: regenerate.num_samples=2",
    }.items():
        code, err = run(*overrides)
        assert code == 2 and err.startswith(told) and err.count("\n") == 1, err
    assert out.read_bytes() == before
    header = {"target": "another", "prompts": "others"}
    (tmp_path / "other.jsonl.partial").write_text(json.dumps(header) + "\n")
    code, err = run(f"out={tmp_path / 'other.jsonl'}")
    assert code == 2 and err.startswith("error: target: not the one that") and err.count("\n") == 1, err
    assert run("overwrite=true", "regenerate.seed=1")[0] == 0 and out.read_bytes() != before


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]}, "role 'tool'"),
        ({"messages": []}, "at least one turn"),
        ({"prompt": " "}, "not empty"),
        ({"question": "x"}, 'with "messages", "prompt" or "text"'),
        ({"messages": None}, 'with "messages", "prompt" or "text"'),
        ({"messages": "x"}, "must be a list"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": None}]}, "needs the strings"),
        ([1], 'with "messages", "prompt" or "text"'),
    ],
)
def test_a_row_that_is_no_prompt_is_told_by_its_line(row, told, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "fine"}\n' + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=rf"prompts\.jsonl:2: .*{told}"):
        read_prompts(path)


@pytest.mark.parametrize("content", ["", "\n  \n\n"])
def test_a_file_without_prompts_is_told(content, tmp_path):
    (path := tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(UserError, match=rf"^prompts={path}: the file holds no prompt; give lines of "):
        read_prompts(path)
    with pytest.raises(UserError, match=rf"^prompts={tmp_path}: a folder; give a JSONL file"):
        read_prompts(tmp_path)


@pytest.mark.parametrize("line", ["no json", '{"text": "a"', "[" * 100_000, "1" * 5000, '{"text": "a"} {"text": "b"}'])
def test_what_is_not_json_is_told_by_its_line(line, tmp_path):
    (path := tmp_path / "prompts.jsonl").write_text('{"text": "fine"}\n\n' + line)
    with pytest.raises(UserError, match=r"prompts\.jsonl:3: (not valid JSON|expected an object)") as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_blank_lines_a_bom_and_a_wrong_suffix_change_nothing(tmp_path, prompts):
    text = "\ufeff\n" + "\r\n \n".join(json.dumps(row) for row in PROMPTS)
    for name, content in (
        ("plain.jsonl", text.encode()),
        ("plain.jsonl.gz", text.encode()),
        ("packed.jsonl", gzip.compress(text.encode())),
        ("packed.gz", gzip.compress(text.encode())),
    ):
        (tmp_path / name).write_bytes(content)
        read = read_prompts(tmp_path / name)
        assert [(p.messages, p.extra) for p in read] == [(p.messages, p.extra) for p in prompts], name
    for content, told in ((gzip.compress(text.encode())[:-9], "damaged gzip file"), (b"\xff\xfe{", "not UTF-8 text")):
        (tmp_path / "damaged.jsonl").write_bytes(content)
        with pytest.raises(UserError, match=rf"damaged\.jsonl: {told}"):
            read_prompts(tmp_path / "damaged.jsonl")


def test_rows_that_come_twice_are_answered_twice(tiny_target, tmp_path):
    """Greedily alike; sampled each by a seed of its own."""
    (path := tmp_path / "prompts.jsonl").write_text(3 * (json.dumps(PROMPTS[3]) + "\n"))
    greedy = lines(regenerate(tiny_target, read_prompts(path), tmp_path / "greedy.jsonl", max_new_tokens=12))
    assert len(greedy) == 3 and len({answers(row)[0] for row in greedy}) == 1
    sampled = lines(regenerate(tiny_target, read_prompts(path), tmp_path / "sampled.jsonl", **SAMPLED))
    assert len(sampled) == 3 == len({answers(row)[0] for row in sampled})


def test_turns_that_the_template_refuses_are_told_before_anything_is_answered(tiny_target, tmp_path, monkeypatch):
    template = (
        "{% for m in messages %}{% if loop.index0 > 1 and m['role'] == 'system' %}{{ raise_exception('no system') }}"
    )
    template += "{% endif %}{% endfor %}" + tiny_target.tokenizer.chat_template
    monkeypatch.setattr(tiny_target.tokenizer, "chat_template", template)
    monkeypatch.setattr(train.regenerate, "generate_rows", lambda *_, **__: pytest.fail("a prompt was answered"))
    late = {"messages": [USER, {"role": "system", "content": "Be brief."}, USER]}  # seen only behind the first answer
    (path := tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*PROMPTS, late]))
    with pytest.raises(UserError, match=r"prompts\.jsonl:7: the target's chat template refuses .* leave such turns"):
        regenerate(tiny_target, read_prompts(path), tmp_path / "out.jsonl", max_new_tokens=4)


def test_the_file_of_prompts_is_never_the_one_written(tmp_path, monkeypatch, capsys):
    (path := tmp_path / "prompts.jsonl").write_text(json.dumps(PROMPTS[0]) + "\n")
    (link := tmp_path / "link.jsonl").symlink_to(path)
    for out in (path, link):
        given = ["+experiment=smoke", f"output_root={tmp_path}", f"prompts={path}", f"out={out}", "overwrite=true"]
        monkeypatch.setattr(sys, "argv", ["regenerate", *given])
        with pytest.raises(SystemExit):
            train.regenerate.main()
        assert capsys.readouterr().err.startswith(f"error: out={out}: is the file of prompts")
    assert json.loads(path.read_text()) == PROMPTS[0]
