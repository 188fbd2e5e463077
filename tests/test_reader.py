"""Packed batches: the right signal for every row in any order, and a resumed run that sees exactly what was left."""

import os
import pickle
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from cache_helpers import FakeTarget, make_rows, numbered_rows
from lightning.pytorch.callbacks import ModelCheckpoint

from data.datamodule import BatchStream, Item, PackedDataModule, PackedRows
from data.reader import CacheReader
from data.signals import SignalSpec, target_columns
from models.errors import UserError
from train.cache import build_cache

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 30, 90)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Every row's states hold the row's own number: a fake target that encodes the row."""
    return build_cache(
        FakeTarget(vocab_size=300),
        numbered_rows(LENGTHS),
        SignalSpec("hidden"),
        cache_root=tmp_path_factory.mktemp("cache"),
        name="numbered",
        shard_tokens=100,
        batch_tokens=256,
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_row_gets_its_own_signal(cache, seed, num_workers):
    module = PackedDataModule(cache, batch_tokens=64, seed=seed, num_workers=num_workers)
    seen = []
    for batch in module.train_dataloader():
        lengths = batch["row_offsets"].diff()
        numbers = batch["row_ids"].repeat_interleave(lengths)  # (N,)
        assert torch.equal(batch["final_hidden"][:, 0].long(), numbers)
        assert torch.equal(batch["input_ids"], numbers)
        assert lengths.tolist() == [LENGTHS[i] for i in batch["row_ids"]] and lengths.sum() <= 64
        seen += batch["row_ids"].tolist()
    assert sorted(seen) == list(range(len(LENGTHS))) and seen != sorted(seen)


def test_reading_is_live_signal_for_any_choice_of_rows(tiny_target, tmp_path):
    rows = make_rows(LENGTHS)
    spec = SignalSpec(top_k=8)
    folder = build_cache(tiny_target, rows, spec, cache_root=tmp_path, name="x", shard_tokens=150, batch_tokens=256)
    reader = CacheReader(folder, max_open=2)
    assert np.array_equal(reader.row_lengths(), LENGTHS) and len(reader) == len(LENGTHS)
    numbers = [71, 3, 89, 0, 44]
    columns = reader.rows(numbers)
    live = target_columns(tiny_target, columns["input_ids"], columns["row_offsets"], spec)
    assert torch.equal(columns["row_ids"], torch.from_numpy(rows.row_ids[numbers]))
    assert torch.equal(columns["topk_ids"], live["topk_ids"])
    assert (columns["tail_logprob"] - live["tail_logprob"]).abs().max() < 1e-4
    assert len(reader._open) == 2


def test_pickled_reader_is_small_and_works(cache):
    reader = CacheReader(cache)
    before = reader.rows([5, 2])
    pickled = pickle.dumps(reader)
    assert len(pickled) < 20_000 and len(reader._open) > 0
    after = pickle.loads(pickled).rows([5, 2])
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow  # a fresh process imports everything
def test_workers_by_spawn_read_bf16(tmp_path):
    rows = numbered_rows([4] * 12)
    target = FakeTarget(vocab_size=50, dtype=torch.bfloat16, scale=1000.5)
    folder = build_cache(
        target, rows, SignalSpec("hidden"), cache_root=tmp_path, name="x", shard_tokens=10, batch_tokens=64
    )
    loader = torch.utils.data.DataLoader(
        PackedRows(folder), batch_size=None, sampler=[Item(np.array([3, 7]))], num_workers=1,
        multiprocessing_context="spawn",
    )  # fmt: skip
    batch = next(iter(loader))
    expected = (torch.tensor([3, 7]) * 1000.5).bfloat16().repeat_interleave(4)
    assert torch.equal(batch["final_hidden"][:, 0], expected)


def test_online_batches_are_the_cached_ones_without_a_signal(cache):
    cached = list(PackedDataModule(cache, batch_tokens=64, seed=3).train_dataloader())
    online = list(PackedDataModule(numbered_rows(LENGTHS), batch_tokens=64, seed=3).train_dataloader())
    assert len(cached) == len(online)
    for a, b in zip(cached, online):
        assert set(a) - set(b) == {"final_hidden", "logsumexp"}
        assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in b)


def test_pred_mask_and_positions():
    rows = make_rows([3, 1, 5, 2])
    batch = PackedRows(rows)[Item(np.array([2, 1, 0]))]
    assert batch["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2]
    assert batch["row_offsets"].tolist() == [0, 5, 6, 9] and batch["row_offsets"].dtype == torch.int32
    expected = [*rows.row(2)[1][1:], False, False, *rows.row(0)[1][1:], False]
    assert batch["pred_mask"].tolist() == expected
    assert not PackedRows(rows)[Item(np.array([2]), False)]["pred_mask"].any()


def test_stream_depends_on_seed_and_epoch_only():
    lengths = np.array(LENGTHS)
    stream = BatchStream(lengths, batch_tokens=64, seed=0, shuffle=True)
    epochs = [np.concatenate(stream.epoch(epoch)).tolist() for epoch in (0, 1)]
    other = BatchStream(lengths, batch_tokens=64, seed=1, shuffle=True)
    assert epochs[0] != epochs[1] != np.concatenate(other.epoch(1)).tolist()
    count = len(stream.epoch(0))
    for start in (0, 1, count - 1, count, count + 2):  # anywhere, also across epochs
        skipped = stream.start_at(0)
        for _ in range(start):
            next(skipped)
        assert np.array_equal(next(stream.start_at(start)), next(skipped))
    with pytest.raises(UserError, match=r"trainer\.batch_tokens=20.*29 tokens"):
        BatchStream(lengths, batch_tokens=20, seed=0, shuffle=True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_each_step_and_take_equally_many(cache, world_size, monkeypatch):
    counted, steps = [], []
    for rank in range(world_size):
        module = PackedDataModule(cache, cache, batch_tokens=64, accumulate=2)
        monkeypatch.setattr(PackedDataModule, "_world_size", world_size)
        for loader, which in ((module.train_dataloader(), counted), (module.val_dataloader(), [])):
            loader.rank = rank
            batches = list(loader)
            assert len(batches) == len(loader)
            which += [row for batch in batches if batch["pred_mask"].any() for row in batch["row_ids"].tolist()]
        steps.append(len(module.train_dataloader()))
    predicting = [i for i, n in enumerate(LENGTHS) if n > 1]
    assert sorted(set(counted) & set(predicting)) == predicting and len(counted) == len(set(counted))
    assert len(set(steps)) == 1 and steps[0] % 2 == 0


def test_numbers_of_steps(cache):
    one = PackedDataModule(cache, batch_tokens=64)
    count = len(one.stream.epoch(0))
    assert one.num_steps() == one.num_batches() == count == len(one.train_dataloader())
    assert PackedDataModule(cache, batch_tokens=64, accumulate=4).num_steps() == -(-count // 4)
    assert PackedDataModule(cache, batch_tokens=64, num_epochs=3, max_steps=5).num_steps() == 5
    endless = PackedDataModule(cache, batch_tokens=64, num_epochs=None, max_steps=10 * count, accumulate=2)
    assert endless.num_batches() == 20 * count
    with pytest.raises(UserError, match=r"trainer\.max_epochs, trainer\.max_steps"):
        PackedDataModule(cache, batch_tokens=64, num_epochs=None)


def test_validation_sees_every_row_once_in_order(cache):
    module = PackedDataModule(cache, cache, batch_tokens=64, val_batch_tokens=128)
    rows = [row for batch in module.val_dataloader() for row in batch["row_ids"].tolist()]
    assert rows == list(range(len(LENGTHS)))
    assert PackedDataModule(cache, batch_tokens=64).val_dataloader() == []


# -- resume under Lightning ----------------------------------------------------------------------------------------


class Recorder(lightning.LightningModule):
    """A one-weight model that remembers which rows it was trained on, and may crash."""

    def __init__(self, crash_at: int | None = None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.crash_at, self.rows, self.lasts = crash_at, [], []

    def training_step(self, batch, batch_idx):
        if batch_idx == self.crash_at:
            raise RuntimeError("crash")
        self.rows.append(batch["row_ids"].tolist())
        self.lasts.append(self.trainer.is_last_batch)
        return (self.weight - batch["final_hidden"].mean()) ** 2

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(cache, folder, *, crash_at=None, num_workers=0, accumulate=1, resume=None, **options):
    torch.manual_seed(0)
    module = Recorder(crash_at)
    data = PackedDataModule(
        cache, cache, batch_tokens=64, seed=5, num_epochs=2, num_workers=num_workers, accumulate=accumulate, **options
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        max_epochs=1, accumulate_grad_batches=accumulate, val_check_interval=4, num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, enable_version_counter=False)],
    )  # fmt: skip
    if crash_at is None:
        trainer.fit(module, datamodule=data, ckpt_path=resume)
    else:
        with pytest.raises(RuntimeError, match="crash"):
            trainer.fit(module, datamodule=data, ckpt_path=resume)
    return module, trainer


@pytest.mark.parametrize("num_workers, accumulate, crash_at", [(0, 1, 3), (2, 1, 30), (0, 2, 8), (2, 2, 8), (0, 1, 4)])
def test_resume_continues_exactly(cache, tmp_path, num_workers, accumulate, crash_at):
    """Killed mid-epoch: the rest of the rows, in the order and with the weights of a run that was not."""
    options = {"num_workers": num_workers, "accumulate": accumulate}
    whole, whole_trainer = fit(cache, tmp_path / "whole", **options)
    before, _ = fit(cache, tmp_path / "cut", crash_at=crash_at, **options)
    after, trainer = fit(cache, tmp_path / "cut", resume=str(tmp_path / "cut" / "last.ckpt"), **options)
    assert before.rows + after.rows == whole.rows
    assert len(before.rows) == crash_at and len(whole.rows) % accumulate == 0
    assert trainer.global_step == whole_trainer.global_step
    assert torch.equal(after.weight, whole.weight)
    assert after.lasts == whole.lasts[crash_at:]


def test_a_checkpoint_of_another_stream_is_refused(cache, tmp_path):
    fit(cache, tmp_path, crash_at=3)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)  # no objects of ours in it
    state = checkpoint["PackedDataModule"]
    assert state["batches_consumed"] == 3
    for changed in ({"batch_tokens": 70, "seed": 5}, {"batch_tokens": 64, "seed": 6}):
        module = PackedDataModule(cache, **changed)
        with pytest.raises(UserError, match=r"(batch_tokens|seed): the checkpoint was made with (64|5)"):
            module.load_state_dict(state)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_worker_s_private_memory_does_not_grow_with_the_cache(tmp_path):
    """70 MB of states: a worker that reads all of them keeps none."""
    rows = make_rows([50] * 20_000, vocab_size=16)
    target = FakeTarget(vocab_size=16)
    target.hidden_size = 16
    folder = build_cache(
        target, rows, SignalSpec("hidden"), cache_root=tmp_path, name="x", shard_tokens=200_000, batch_tokens=50_000
    )

    class Private(PackedRows):
        def __getitem__(self, item):
            super().__getitem__(item)
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024  # MB

    loader = torch.utils.data.DataLoader(
        Private(folder), batch_size=None, num_workers=1,
        sampler=[Item(np.arange(start, start + 500)) for start in range(0, 20_000, 500)],
    )  # fmt: skip
    private = list(loader)
    assert private[-1] - private[0] < 20
