"""The cache on disk: exact content, reuse of the same only, nothing lost or wrongly trusted after a crash."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_helpers import FakeTarget, make_rows, numbered_rows
from safetensors import safe_open

import data.cache_plan as cache_plan
import data.cache_writer as cache_writer
from data.cache import Manifest
from data.cache_plan import comparison, cut_shards
from data.reader import CacheReader
from data.rows import Rows
from data.signals import SignalSpec, target_columns
from data.verify import main as verify
from data.verify import verify_cache
from models.errors import UserError
from models.target import load_target
from models.tiny import byte_tokenizer
from train.cache import build_cache

REPO = Path(__file__).parents[1]
LENGTHS = [30, 5, 64, 12, 12, 1, 100, 47, 8, 3]


def build(target, rows, root, spec=None, **options):
    options = {"name": "x", "shard_tokens": 120, "batch_tokens": 128, **options}
    return build_cache(target, rows, spec or SignalSpec(top_k=8), cache_root=root, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_shards_hold_every_row_and_open_with_safetensors(tiny_target, tmp_path):
    rows = make_rows(LENGTHS)
    folder = build(tiny_target, rows, tmp_path)
    assert sorted(p.name for p in folder.glob("shard*")) == [f"shard-0000{i}.safetensors" for i in range(3)]
    columns: dict[str, list] = {}
    for path in sorted(folder.glob("shard*")):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                columns.setdefault(name, []).append(shard.get_tensor(name))
    assert np.array_equal(torch.cat(columns["input_ids"]).numpy(), rows.input_ids)
    assert np.array_equal(torch.cat(columns["loss_mask"]).numpy(), rows.loss_mask)
    assert np.array_equal(torch.cat(columns["row_ids"]).numpy(), rows.row_ids)
    assert sum(len(c) for c in columns["topk_ids"]) == rows.num_tokens  # no padding
    assert all(c[0] == 0 for c in columns["row_offsets"])
    assert verify_cache(folder) == []


def test_batching_and_repetition_change_nothing(tiny_target, tmp_path):
    rows = make_rows([3, 17, 512, 40, 2, 41, 300])
    spec = SignalSpec("hidden")
    one = CacheReader(build(tiny_target, rows, tmp_path / "one", spec, batch_tokens=1))  # every row alone
    many = CacheReader(build(tiny_target, rows, tmp_path / "many", spec, batch_tokens=4096, shard_tokens=5000))
    again = build(tiny_target, rows, tmp_path / "again", spec, batch_tokens=4096, shard_tokens=5000)
    assert contents(again) == contents(many.folder)
    for i in range(len(rows)):
        a, b = one.row(i), many.row(i)
        assert np.array_equal(a["input_ids"].numpy(), rows.row(i)[0])
        assert len(a["final_hidden"]) == len(rows.row(i)[0])
        for name in ("final_hidden", "logsumexp"):
            assert (a[name] - b[name]).abs().max() < 1e-4


def test_padding_of_a_forward_is_bounded():
    target = FakeTarget(vocab_size=50)
    rows = numbered_rows([3, 17, 40, 12, 3, 3, 16, 30])
    target_columns(target, torch.from_numpy(rows.input_ids), torch.from_numpy(rows.row_offsets), SignalSpec("hidden"))
    assert target.num_padded * 0.75 <= rows.num_tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_values_and_bf16_survive_bit_for_bit(dtype, tmp_path):
    target = FakeTarget(vocab_size=50, dtype=dtype, scale=10_000.0, tap_ids=(0, 1, 2))  # token 7 gives 70000
    rows = numbered_rows([4] * 9)
    reader = CacheReader(build(target, rows, tmp_path, SignalSpec("hidden", tap_ids=(0, 1, 2))))
    row = reader.row(7)
    assert row["final_hidden"].dtype == dtype and row["taps"].dtype == torch.bfloat16
    assert row["final_hidden"].float().unique().tolist() == [70144.0 if dtype == torch.bfloat16 else 70000.0]
    assert row["taps"].float().unique().tolist() == [70144.0]
    assert reader.manifest.content["columns"]["taps"] == {"dtype": "BF16", "shape": [3, 4]}


def test_fp16_overflow_names_row_and_column(tmp_path):
    target = FakeTarget(vocab_size=50, dtype=torch.float16, scale=10_000.0)
    message = r"row 7, column final_hidden: the target gave inf \(largest finite value of the batch 60000\).*dtype=bf16"
    with pytest.raises(UserError, match=message):
        build(target, numbered_rows([4] * 9), tmp_path, SignalSpec("hidden"))
    assert not list(tmp_path.rglob(".*.tmp"))


def test_large_ids_survive_the_disk(tmp_path):
    ids = np.array([50256, 65536, 151643], dtype=np.int32)
    rows = Rows(ids, np.ones(3, dtype=bool), np.array([0, 3]), np.array([2**40]))
    target = FakeTarget(vocab_size=151936, favourites=tuple(ids.tolist()))
    row = CacheReader(build(target, rows, tmp_path, SignalSpec(top_k=3))).row(0)
    assert row["input_ids"].tolist() == ids.tolist() and row["row_ids"].tolist() == [2**40]
    assert row["topk_ids"].tolist() == [ids.tolist()] * 3


# -- plan ----------------------------------------------------------------------------------------------------------


def test_plan_numbers_of_ten_million_gpt2_tokens():
    sizes = [round(size / 1e9, 2) for size in comparison(10_000_000, 50257, 768).values()]
    assert sizes == [1005.14, 3.84, 15.36, 46.08]


def test_plan_prints_and_writes_nothing(tiny_target, tmp_path, capsys):
    target = FakeTarget(vocab_size=259)
    rows = make_rows([100] * 20)
    folder = build(target, rows, tmp_path, plan=True)
    said = capsys.readouterr().out
    assert "2,000 tokens in 20 rows" in said and "free on disk" in said and "topk_ids" in said
    assert not folder.exists() and target.num_forwards == 0


@pytest.mark.parametrize("spec", [SignalSpec(), SignalSpec("hidden")])
def test_estimate_is_within_five_percent(spec, tiny_target, tmp_path):
    rows = make_rows([100] * 100)  # 10k tokens
    folder = build(tiny_target, rows, tmp_path, spec, shard_tokens=4000, batch_tokens=4096)
    plan = cache_plan.CachePlan(
        folder, Manifest.open(folder).columns, cut_shards(rows.row_offsets, 4000), tiny_target.vocab_size, 64
    )
    actual = sum(path.stat().st_size for path in folder.iterdir())
    assert abs(plan.num_bytes() - actual) < 0.05 * actual


def test_what_does_not_fit_is_refused_before_any_forward(monkeypatch, tmp_path):
    monkeypatch.setattr(cache_plan, "free_bytes", lambda folder: 1000)
    target = FakeTarget(vocab_size=259)
    for plan in (True, False):
        with pytest.raises(UserError, match=r"cache_root.*needs .* 1.00 kB free.*cache\.top_k"):
            build(target, make_rows(LENGTHS), tmp_path, plan=plan)
    assert target.num_forwards == 0 and not any(tmp_path.iterdir())


def test_rows_that_do_not_suit_the_target_are_refused(tiny_gpt2_target, tmp_path):
    with pytest.raises(UserError, match=r"data\.max_length.*300 tokens.*256"):
        build(tiny_gpt2_target, make_rows([300]), tmp_path)
    with pytest.raises(UserError, match=r"token id .* tokenizer"):
        build(tiny_gpt2_target, make_rows([50], vocab_size=1000), tmp_path)
    with pytest.raises(UserError, match="no rows"):
        build(tiny_gpt2_target, make_rows([]), tmp_path)


# -- reuse ---------------------------------------------------------------------------------------------------------


def test_the_same_cache_is_reused_and_says_so(tmp_path, capsys):
    target, rows, seen = FakeTarget(vocab_size=259), make_rows(LENGTHS), []
    folder = build(target, rows, tmp_path, on_stats=seen.append)
    num_forwards, before = target.num_forwards, contents(folder)
    capsys.readouterr()
    assert build(target, rows, tmp_path, shard_tokens=60, on_stats=seen.append) == folder  # another cut: still the same
    assert "reused" in capsys.readouterr().out and len(capsys.readouterr().out.splitlines()) <= 1
    assert target.num_forwards == num_forwards and contents(folder) == before
    written, reused = (stats.metrics() for stats in seen)
    assert written["cache/tokens_per_s"] > 0 and written["cache/tokens"] == rows.num_tokens
    assert reused == {key: written[key] for key in ("cache/tokens", "cache/bytes")}


def changed_template(target, rows):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template + " "
    target.tokenizer = tokenizer
    return rows


def changed_tokenizer(target, rows):
    target.tokenizer = byte_tokenizer()
    target.tokenizer.add_tokens(["<extra>"])
    return rows


def changed_weights(target, rows):
    next(target.model.parameters()).view(-1)[0] += 1
    return rows


@pytest.mark.parametrize(
    "field, options, change",
    [
        ("chat_template", {}, changed_template),
        ("tokenizer", {}, changed_tokenizer),
        ("target_weights", {}, changed_weights),
        ("target_dtype", {"dtype": "bf16"}, None),
        ("longest_row: 100 -> 64", {}, lambda target, rows: make_rows([min(n, 64) for n in LENGTHS])),
        ("top_k: 8 -> 9", {"spec": SignalSpec(top_k=9)}, None),
        (
            "tap_ids: null -> \\[2, 4, 5\\]",
            {"spec": SignalSpec(top_k=8, tap_ids=(2, 4, 5)), "tap_ids": "default"},
            None,
        ),
        ("signal: topk -> hidden", {"spec": SignalSpec("hidden")}, None),
    ],
)
def test_a_change_makes_a_new_cache_and_names_the_field(field, options, change, tiny_target, tmp_path, capsys):
    rows = make_rows(LENGTHS)
    old = build(tiny_target, rows, tmp_path)
    target = load_target(
        "random:tiny_llama", dtype=options.get("dtype", "fp32"), device="cpu", tap_ids=options.get("tap_ids")
    )
    rows = rows if change is None else change(target, rows)
    capsys.readouterr()
    new = build(target, rows, tmp_path, options.get("spec"))
    said = capsys.readouterr().out
    assert new != old

    assert re.search(f"differs from {old.name} in .*{field}", said), said


# -- crashes, damage and full disks --------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_jobs_end_with_the_bytes_of_an_uninterrupted_one(tmp_path):
    """SIGKILL at ten random moments, and at each system call that matters, before and after it."""
    script = Path(__file__).parent / "kill_cache_job.py"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPO), str(script.parent)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), str(tmp_path), "0"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    seen = json.loads(result.stdout.splitlines()[-1])
    assert seen["killed_equal"] and seen["points_equal"] and seen["untrusted"] == 0
    assert seen["done_at_kill"] and min(seen["done_at_kill"]) < seen["shards"], seen  # some kills came in the middle
    assert seen["died"] == seen["points"]


def test_full_disk_is_one_line_and_the_next_run_continues(tiny_target, tmp_path, monkeypatch):
    rows = make_rows(LENGTHS)
    whole = build(tiny_target, rows, tmp_path / "whole")
    original, room = os.pwrite, [9000]

    def pwrite(descriptor, content, position):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        content = content[: room[0]]  # a full disk takes what still fits
        room[0] -= len(content)
        return original(descriptor, content, position)

    monkeypatch.setattr(cache_writer.os, "pwrite", pwrite)
    with pytest.raises(UserError, match=r"^cache_root: the disk of .* is full \(No space left on device\)[^\n]*$"):
        build(tiny_target, rows, tmp_path / "full")
    monkeypatch.undo()
    folder = next((tmp_path / "full").iterdir())
    assert 0 < len(Manifest.open(folder).shards) < 3 and not Manifest.open(folder).damaged_shards()
    assert not list(folder.glob(".*.tmp"))
    with pytest.raises(UserError, match=r"unfinished, \d of 3 shards"):
        CacheReader(folder)
    assert contents(build(tiny_target, rows, tmp_path / "full")) == contents(whole)


def test_a_stale_file_goes_and_a_live_writer_s_stays(tmp_path):
    folder = build(FakeTarget(vocab_size=259), make_rows(LENGTHS), tmp_path)
    (folder / ".shard-00007.safetensors.1.tmp").write_bytes(b"left by a dead process")
    layout = cache_plan.shard_layout(Manifest.open(folder).columns, tokens=3, rows=1)
    live = cache_writer.ShardFile(folder, "shard-00008.safetensors", layout)
    cache_writer.remove_stale_files(folder)
    assert list(folder.glob(".*.tmp")) == [live.temporary]
    live.abandon()


@pytest.fixture
def cached(tmp_path):
    target, rows = FakeTarget(vocab_size=259), make_rows(LENGTHS)
    folder = build(target, rows, tmp_path)
    return target, rows, folder, folder / "shard-00001.safetensors"


def test_a_flipped_byte_is_found_before_it_is_trained_on(cached, capsys):
    target, rows, folder, path = cached
    before = contents(folder)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    build(target, rows, folder.parent)
    assert "shard-00001.safetensors is rebuilt: its checksum is another one" in capsys.readouterr().out
    assert contents(folder) == before


def test_truncated_shard(cached, capsys):
    target, rows, folder, path = cached
    before = contents(folder)
    path.write_bytes(path.read_bytes()[:-1024])
    with pytest.raises(UserError, match=r"shard-00001\.safetensors: 1024 bytes are missing[^\n]*$"):
        CacheReader(folder)
    assert verify([str(folder)]) == 1
    assert "shard-00001.safetensors: 1024 bytes are missing" in capsys.readouterr().err
    build(target, rows, folder.parent)
    assert "shard-00001.safetensors is rebuilt: 1024 bytes are missing" in capsys.readouterr().out
    assert contents(folder) == before


def test_shard_cut_after_opening_never_gives_a_batch(cached):
    _, _, folder, path = cached
    reader = CacheReader(folder)
    path.write_bytes(path.read_bytes()[:-1024])
    with pytest.raises(UserError, match="1024 bytes are missing"):
        reader.rows(range(len(reader)))


def test_flipped_byte_missing_and_longer_files(cached, capsys):
    _, _, folder, path = cached
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert verify([str(folder.parent)]) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and "shard-00001.safetensors: checksum" in errors[0]
    path.write_bytes(content + b"x")
    with pytest.raises(UserError, match="1 bytes too long"):
        CacheReader(folder)
    path.unlink()
    with pytest.raises(UserError, match="the file is missing"):
        CacheReader(folder)
    assert verify([str(folder.parent / "nothing")]) == 2


def test_verify_finds_wrong_values_behind_a_right_checksum(cached):
    _, _, folder, path = cached
    manifest = Manifest.open(folder)
    record = manifest.shards[1]
    layout = cache_plan.shard_layout(manifest.columns, tokens=record.tokens, rows=record.rows)
    wrong = {
        "topk_ids": (np.int32(259), "topk_ids: ids outside 0 to 258"),
        "topk_logprobs": (np.float16("nan"), "topk_logprobs: values that are not finite"),
        "tail_logprob": (np.float32(0.5), "do not sum to one"),
        "loss_mask": (np.uint8(7), "loss_mask: values other than"),
    }
    sound = path.read_bytes()
    for column, (value, message) in wrong.items():
        content = bytearray(sound)
        content[layout.starts[column] : layout.starts[column] + value.nbytes] = value.tobytes()
        path.write_bytes(content)
        changed = cache_writer.ShardRecord(
            rows=record.rows, tokens=record.tokens, bytes=record.bytes, checksum=cache_writer.file_checksum(path)
        )
        manifest.update_ledger(add={1: changed})
        assert any(message in problem for problem in verify_cache(folder)), column


# -- several processes ---------------------------------------------------------------------------------------------

TWO_RANKS = """
import sys, torch
torch.set_num_threads(1)
from cache_helpers import make_rows
from data.signals import SignalSpec
from models.target import load_target
from train.cache import build_cache
target = load_target("random:tiny_llama", dtype="fp32", device="cpu")
for repeats in (5, 1):  # as training does: one cache after the other in the same processes; the second is one shard
    rows = make_rows([40, 3, 20, 12] * repeats)
    build_cache(target, rows, SignalSpec(top_k=8), cache_root=sys.argv[1], name=f"x{repeats}", shard_tokens=120,
                batch_tokens=128, devices=int(sys.argv[2]), strategy=sys.argv[3])
"""


@pytest.mark.slow
def test_two_ranks_write_the_bytes_of_one(tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), str(REPO / "tests")])}
    environment |= {"OMP_NUM_THREADS": "1"}
    for devices, strategy in (("1", "auto"), ("2", "ddp")):
        command = [sys.executable, str(script), str(tmp_path / devices), devices, strategy]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr[-3000:]
    one, two = sorted((tmp_path / "1").iterdir()), sorted((tmp_path / "2").iterdir())
    assert [folder.name for folder in one] == [folder.name for folder in two] and len(one) == 2
    for a, b in zip(one, two):
        assert contents(a) == contents(b)
