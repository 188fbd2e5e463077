"""Cache the target's signal on disk: `python -m train.cache +experiment=NAME` (plan=true only prints the sizes).

1. Cut the rows into shards and print tokens, bytes and free disk; refuse what does not fit.
2. A Lightning predict job runs the target over the shards that the ledger lacks; each rank takes its own shards.
3. A thread of each rank writes them (data/cache_writer.py).
Batches depend on the shard alone, so a job that was killed and run again ends with the same bytes.
"""

import logging
import re
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lightning
import numpy as np
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader

from data.cache import Manifest, cache_columns, changed_fields, fingerprint, fingerprint_fields, folder_lock, shard_name
from data.cache_plan import CachePlan, cut_shards, human
from data.cache_writer import CacheBatch, CacheWriter, file_checksum, remove_stale_files
from data.progress import ProgressBar
from data.rows import Rows, load_rows
from data.signals import SignalSpec, length_groups, split_specs, target_columns
from eval.entry import entry
from models.errors import UserError
from models.target import Target, resolve_device


@dataclass(frozen=True)
class CacheStats:
    """What a job did, for loggers: `on_stats(stats)` gets it, `stats.metrics()` are the keys `cache/*`."""

    folder: Path
    tokens: int  # of the whole cache
    bytes: int
    new_tokens: int  # written by this job, by all ranks
    seconds: float  # from the first forward to the last byte, without the start of processes

    def metrics(self) -> dict[str, float]:
        metrics = {"cache/tokens": float(self.tokens), "cache/bytes": float(self.bytes)}
        if self.new_tokens:
            metrics["cache/seconds"] = self.seconds
            metrics["cache/tokens_per_s"] = self.new_tokens / self.seconds
        return metrics


def build_cache(
    target: Target,
    rows: Rows,
    spec: SignalSpec,
    *,
    cache_root: str | Path,
    name: str,
    shard_tokens: int = 262_144,
    batch_tokens: int = 4096,
    plan: bool = False,
    devices: int | str = 1,
    num_nodes: int = 1,
    strategy: str = "auto",
    on_stats: Callable[[CacheStats], None] | None = None,
) -> Path:
    """Make the cache of these rows, or what is missing of it; returns its folder `<cache_root>/<name>-<fingerprint>`.

    A finished cache of the same target, rows and columns is reused. Shards whose file is missing or is not the one that
    the ledger lists (size, checksum) are written again.
    plan: print tokens, bytes and free disk, and write nothing.
    batch_tokens: padded tokens of one forward; a matter of memory and speed.
    Raises UserError: no rows, rows beyond the target's positions or ids, a disk too small or full, a value not finite.
    """
    spec.check(target)
    _check_rows(target, rows)
    fields = fingerprint_fields(target, rows, spec)
    name = re.sub(r"[^\w.-]+", "_", name)
    folder = Path(cache_root) / f"{name}-{fingerprint(fields)}"
    manifest = Manifest.open(folder) if (folder / "manifest.json").is_file() else None
    if manifest is not None:
        shard_tokens = manifest.content["shard_tokens"]  # a cache keeps the cut it began with
    shards = cut_shards(rows.row_offsets, shard_tokens)
    sizes = CachePlan(folder, cache_columns(spec, target), shards, target.vocab_size, target.hidden_size)
    damaged = {} if manifest is None else damaged_shards(manifest, read=not plan)
    done = set() if manifest is None else set(manifest.shards) - set(damaged)
    missing = [shard.index for shard in shards if shard.index not in done]
    for index, what in damaged.items():
        say(f"cache {folder.name}: {shard_name(index)} is rebuilt: {what}")
    if plan:
        say(sizes.describe(missing))
        if missing:
            sizes.check_space(missing)
        return folder
    seconds = 0.0
    if missing:
        if manifest is None and (nearest := changed_fields(Path(cache_root), name, fields)) is not None:
            say(f"cache {folder.name}: new, because it differs from {nearest[0].name} in {'; '.join(nearest[1])}")
        say(sizes.describe(missing))
        sizes.check_space(missing)
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_files(folder)
        with folder_lock(folder):
            if not (folder / "manifest.json").is_file():  # of several ranks the first makes it
                Manifest.new(folder, target, rows, spec, shard_tokens=shard_tokens, num_shards=len(shards)).save()
        manifest = Manifest.open(folder)
        manifest.update_ledger(drop=list(damaged))
        job = CacheJob(target, rows, spec, manifest, [shards[i] for i in missing], batch_tokens=batch_tokens)
        _predict(job, target, devices=devices, num_nodes=num_nodes, strategy=strategy)
        seconds = job.seconds
        manifest = Manifest.open(folder)
        assert manifest.is_complete, f"{folder}: shards are missing after a job without an error"
        new_tokens = sum(shards[i].tokens for i in missing)
        say(
            f"cache {folder.name}: {new_tokens:,} tokens in {seconds:.1f} s ({new_tokens / seconds:,.0f} tokens/s), "
            f"{human(sizes.num_bytes())}"
        )
    else:
        say(f"cache {folder.name}: reused, {sizes.num_tokens:,} tokens, {human(sizes.num_bytes())}")
    if on_stats is not None:
        total_bytes = sum(record.bytes for record in manifest.shards.values())
        new_tokens = sum(shards[i].tokens for i in missing)
        on_stats(CacheStats(folder, sizes.num_tokens, total_bytes, new_tokens, seconds))
    return folder


class CacheJob(lightning.LightningModule):
    """Predict job: one step is one forward of the target on some rows of one shard."""

    def __init__(
        self, target: Target, rows: Rows, spec: SignalSpec, manifest: Manifest, shards: list, *, batch_tokens: int
    ):
        super().__init__()
        self.__dict__["target"] = target  # not a submodule: Lightning must not move or convert it
        self.rows, self.spec, self.manifest, self.missing = rows, spec, manifest, shards
        self.batch_tokens = batch_tokens
        self.writer: CacheWriter | None = None

    def setup(self, stage: str) -> None:
        # every rank starts from the same list of missing shards and takes its own; none writes before all are here
        self.trainer.strategy.barrier("cache")
        device = self.trainer.strategy.root_device
        if self.target.device != device and len({p.device for p in self.target.parameters()}) == 1:
            self.target.to(device)
        own = self.missing[self.trainer.global_rank :: self.trainer.world_size]
        self.batches = [batch for shard in own for batch in self._shard_batches(shard)]
        self.batches = self.batches or [None]  # a rank without a shard still meets the others at the barriers

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None, shuffle=False, collate_fn=None)

    def transfer_batch_to_device(self, batch: CacheBatch, device: torch.device, dataloader_idx: int) -> CacheBatch:
        return batch

    def on_predict_start(self) -> None:
        self.writer = CacheWriter(self.manifest, self.rows)
        new_tokens = sum(int(self._lengths(batch.rows).sum()) for batch in self.batches if batch is not None)
        self.progress = ProgressBar(f"caching {self.manifest.folder.name}", new_tokens, "tokens")
        self.progress.__enter__()
        self._start = time.monotonic()

    def predict_step(self, batch: CacheBatch | None, batch_idx: int) -> int:
        if batch is None:
            return batch_idx
        lengths = self._lengths(batch.rows)
        input_ids = torch.from_numpy(np.concatenate([self.rows.row(int(row))[0] for row in batch.rows]))  # (n,)
        row_offsets = torch.from_numpy(np.cumsum([0, *lengths]))  # (R+1,)
        self.writer.submit(batch, target_columns(self.target, input_ids, row_offsets, self.spec))
        if self.trainer.is_global_zero:
            self.progress.advance(int(lengths.sum()))
        return batch_idx  # nothing is collected; None would make Lightning warn

    def on_predict_end(self) -> None:
        self.writer.close()
        self.progress.__exit__(None, None, None)
        self.trainer.strategy.barrier("cache")  # nobody reads before the last rank has written
        self.seconds = time.monotonic() - self._start

    def stop(self) -> None:
        """After an error: end the thread, drop the unfinished shard."""
        if self.writer is not None:
            self.writer.stop()
            self.progress.__exit__(None, None, None)

    def _lengths(self, rows: np.ndarray) -> np.ndarray:  # (R,)
        return self.rows.row_offsets[rows + 1] - self.rows.row_offsets[rows]

    def _shard_batches(self, shard) -> list[CacheBatch]:
        """Rows of similar length together. A function of the shard and batch_tokens alone."""
        lengths = np.diff(self.rows.row_offsets[shard.first_row : shard.end_row + 1])
        groups = length_groups(lengths, self.batch_tokens)
        return [CacheBatch(shard, shard.first_row + rows, i == len(groups) - 1) for i, rows in enumerate(groups)]


def _predict(job: CacheJob, target: Target, *, devices: int | str, num_nodes: int, strategy: str) -> None:
    is_cuda = target.device.type == "cuda"
    with _quiet_lightning():
        trainer = lightning.Trainer(
            accelerator="gpu" if is_cuda else "cpu",
            devices=[target.device.index or 0] if is_cuda and devices == 1 else devices,
            num_nodes=num_nodes,
            strategy=strategy,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        try:
            trainer.predict(job, return_predictions=False)
        finally:
            job.stop()


@contextmanager
def _quiet_lightning():
    """Without Lightning's start-up lines about devices and hints."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*LeafSpec.*deprecated.*")
            yield
    finally:
        logger.setLevel(level)


def _check_rows(target: Target, rows: Rows) -> None:
    if not len(rows):
        raise UserError("data.sources: no rows to cache; give a source with documents for this split")
    longest = int(np.diff(rows.row_offsets).max())
    if longest > target.max_positions:
        raise UserError(
            f"data.max_length: a row has {longest} tokens and the target {target.max_positions} positions; "
            f"set data.max_length={target.max_positions} or less"
        )
    largest = int(rows.input_ids.max())
    if largest >= target.vocab_size or int(rows.input_ids.min()) < 0:
        raise UserError(
            f"data: a row holds token id {largest} and the target has ids 0 to {target.vocab_size - 1}; tokenise the "
            f"rows with the target's own tokenizer"
        )


def damaged_shards(manifest: Manifest, *, read: bool) -> dict[int, str]:
    """Shards that are not what the ledger says, with what is wrong. read: compare checksums as well."""
    damaged = manifest.damaged_shards()
    if read:
        for index, record in manifest.shards.items():
            if index not in damaged and file_checksum(manifest.folder / shard_name(index)) != record.checksum:
                damaged[index] = "its checksum is another one, bytes have changed"
    return damaged


@rank_zero_only
def say(text: str) -> None:
    print(text, flush=True)


def rows_of(cfg: DictConfig, target: Target, split: str) -> Rows:
    return load_rows(
        OmegaConf.to_container(cfg.data.sources, resolve=True),
        target.tokenizer,
        split=split,
        max_length=cfg.data.max_length,
        held_out_fraction=cfg.data.held_out_fraction,
        seed=cfg.data.seed,
        max_tokens=cfg.data[f"max_{split}_tokens"],
    )


def caches(
    cfg: DictConfig, target: Target, spec: SignalSpec, rows: dict[str, Rows]
) -> tuple[dict[str, Rows | Path], dict[str, float]]:
    """Where batches come from: the folder of each split's cache, or the rows themselves (cache.mode=none)."""
    specs = split_specs(spec)
    if cfg.cache.mode == "none":
        for split_rows in rows.values():
            _check_rows(target, split_rows)
        return dict(rows), {}
    trainer = instantiate(cfg.trainer, _convert_="all").beside(cfg.target.device_map)
    metrics: dict[str, float] = {}
    folders: dict[str, Rows | Path] = {}
    for split, split_rows in rows.items():
        folders[split] = build_cache(
            target,
            split_rows,
            specs[split],
            cache_root=cfg.cache_root,
            name=f"{cfg.cache.name or target.name}-{split}",
            shard_tokens=cfg.cache.shard_tokens,
            batch_tokens=cfg.cache.batch_tokens,
            plan=cfg.plan,
            devices=trainer.num_devices(resolve_device(cfg.device)),
            num_nodes=trainer.num_nodes,
            strategy=trainer.strategy,
            on_stats=(lambda stats: metrics.update(stats.metrics())) if split == "train" else None,
        )
    return folders, metrics


@entry("cache")
def main(cfg: DictConfig) -> None:
    """Cache the rows of both splits, as train.distill would."""
    if cfg.cache.mode != "disk":
        raise UserError(f"cache.mode={cfg.cache.mode}: there is nothing to cache; use cache=topk or cache=hidden")
    instantiate(cfg.trainer, _convert_="all").beside(cfg.target.device_map)  # checks its keys
    target: Target = instantiate(cfg.target)
    spec = SignalSpec(cfg.cache.signal, cfg.cache.top_k, target.tap_ids)
    # rows of both splits before the first forward: an empty one is told at once
    caches(cfg, target, spec, {split: rows_of(cfg, target, split) for split in ("train", "held_out")})


if __name__ == "__main__":
    main()
