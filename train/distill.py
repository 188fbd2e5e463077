"""Distil a draft from a target: python -m train.distill +experiment=NAME.

1. check the config and the run's folder; nothing heavy has happened yet
2. target, draft, rows; the caches that are missing
3. Lightning fit, continued from state/last.ckpt where there is one
4. save the draft in transformers' layout; expected acceptance on the held-out rows; run.json
"""

import re
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import PreTrainedModel

from data.datamodule import BatchStream, Item, PackedDataModule, PackedRows
from data.draft_vocab import coverage, frequent_ids
from data.rows import Rows
from data.signals import SignalSpec, target_columns
from eval.alpha import evaluate_pair
from eval.entry import entry
from eval.results import Metric, git_sha, run_info
from eval.run import Pair, load_for
from models.drafts import max_positions
from models.eagle import EagleHead
from models.errors import UserError
from models.medusa import MedusaHeads
from models.servable import DRAFT_MODEL, unservable_lines
from models.target import Target, resolve_device
from train.cache import caches, rows_of, say
from train.callbacks import Metrics, Snapshots, StateCheckpoint, WeightAverage
from train.eagle_module import Eagle1Distiller, Eagle3Distiller
from train.loggers import finish_loggers
from train.losses import LossSpec
from train.medusa_module import MedusaDistiller
from train.module import Distiller, OptimSpec
from train.run_folder import RunFolder, Start, read_checkpoint
from train.trainer import TrainerSpec, fast_fp32


def distill(cfg: DictConfig) -> Path:
    """The whole run of a composed config; returns its folder. A finished run of the same config is left as it is."""
    device = resolve_device(cfg.device)
    loss, optim, trainer = (instantiate(cfg[group], _convert_="all") for group in ("loss", "optim", "trainer"))
    trainer = trainer.beside(cfg.target.device_map)
    check_lengths(cfg, trainer)
    check_head(cfg)
    if loss.temperature != 1 and cfg.draft.kind in ("eagle3", "medusa"):
        raise UserError(
            f"loss.temperature={loss.temperature}: draft={cfg.draft.kind} learns at 1 only, where the target's mass "
            "outside of a draft vocabulary is known; set it to 1"
        )
    if loss.temperature != 1 and cfg.cache.signal == "topk":
        raise UserError(f"loss.temperature={loss.temperature}: needs the whole distribution, set cache=hidden")
    if cfg.cache.mode not in ("disk", "none"):
        raise UserError(f"cache.mode={cfg.cache.mode}: unknown; use disk or none")
    num_processes = trainer.num_devices(device) * trainer.num_nodes
    refuse_distributed_sweep(num_processes)
    folder = RunFolder(cfg.checkpoint_root, run_name(cfg))
    config = OmegaConf.to_container(cfg, resolve=True)
    config["run"] = folder.name
    start = folder.check(config, resume=str(cfg.resume), overwrite=cfg.overwrite)
    if start.is_finished:
        say(f"run {folder.name}: finished before with this config, in {folder.path}; overwrite=true trains it again")
        return folder.path
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)
    target: Target = instantiate(cfg.target)
    if is_head(cfg):
        say_unservable(target, cfg.draft.kind, tap_ids=target.tap_ids if cfg.draft.kind == "eagle3" else None)
        rows = {split: rows_of(cfg, target, split) for split in ("train", "held_out")}
        draft, vocab_metrics = build_head(cfg, target, rows)
    else:
        draft, vocab_metrics = instantiate(cfg.draft, target=target, seed=cfg.seed), {}
        say_unservable(target, DRAFT_MODEL, draft.config)
        if cfg.data.max_length > max_positions(draft):
            raise UserError(too_long(cfg.data.max_length, max_positions(draft)))
        rows = {split: rows_of(cfg, target, split) for split in ("train", "held_out")}
    spec = SignalSpec(cfg.cache.signal, cfg.cache.top_k, target.tap_ids)
    spec.check(target)
    sources, cache_metrics = caches(cfg, target, spec, rows)
    if cfg.plan:
        return folder.path
    data = PackedDataModule(
        sources["train"],
        sources["held_out"],
        batch_tokens=trainer.batch_tokens,
        seed=cfg.seed,
        num_epochs=trainer.max_epochs,
        max_steps=trainer.max_steps,
        accumulate=trainer.accumulate,
        num_workers=trainer.num_workers,
        pin_memory=device.type == "cuda",
        simulated_steps=simulated_depth(cfg).get("steps") or 0,
    )
    total_steps = data.num_steps(num_processes)
    if start.step is not None and start.step > total_steps:
        raise UserError(
            f"trainer.max_steps={trainer.max_steps}, trainer.max_epochs={trainer.max_epochs}: end the run after "
            f"{total_steps} steps, and {start.checkpoint} has {start.step} behind it; raise them, or choose another "
            "run=NAME"
        )
    if isinstance(draft, EagleHead) and draft.config.version == 3:
        draft.set_tap_scale(some_taps(target, sources["train"], spec), keep_function=cfg.draft.init != "scratch")
    folder.begin(config, overwrite=cfg.overwrite)
    try:
        loggers = [
            instantiate(node)(
                folder=Path(cfg.output_root) / folder.name,
                run=folder.name,
                run_id=folder.run_id,
                config={**config, "git_sha": git_sha(), "run_folder": str(folder.path)},
                resume_step=start.step,
            )
            for node in cfg.logger.values()
        ]
        info, is_first_rank = fit(
            draft,
            target,
            data,
            total_steps=total_steps,
            device=device,
            folder=folder,
            start=start,
            loss=loss,
            optim=optim,
            spec=spec,
            trainer=trainer,
            loggers=loggers,
            extra=cache_metrics | vocab_metrics,
            simulation=simulated_depth(cfg),
        )
        if is_first_rank:
            folder.save_draft(draft, target.tokenizer)
            metrics = judge(cfg, folder, target, rows["held_out"])
            for logger in loggers:
                logger.log_metrics({f"eval/{key}": m.value for key, m in metrics.items()}, step=info["steps"])
            folder.finish(
                {
                    **run_info(),
                    "metrics": {**info.pop("metrics"), **{key: m.value for key, m in metrics.items()}},
                    "target": {"name": target.name, **target.fingerprint()},
                    "data": {split: each.fingerprint() for split, each in rows.items()},
                    "device": str(device),
                    "precision": trainer.resolved_precision(device),
                    "processes": num_processes,
                    **info,
                }
            )
            say(f"run {folder.name}: saved to {folder.path}")
    finally:
        finish_loggers()
        folder.release()
    return folder.path


def fit(
    draft: PreTrainedModel | EagleHead | MedusaHeads,
    target: Target,
    data: PackedDataModule,
    *,
    total_steps: int,
    device: torch.device,
    folder: RunFolder,
    start: Start,
    loss: LossSpec,
    optim: OptimSpec,
    spec: SignalSpec,
    trainer: TrainerSpec,
    loggers: list,
    extra: dict[str, float],
    simulation: dict[str, Any],
) -> tuple[dict[str, Any], bool]:
    """Train `draft` in place (with ema_decay: to its average). Returns the figures, and whether this is rank 0.

    device: what the config says, `cuda` without a number for all GPUs (the target's own is always one of them).
    """
    began = time.monotonic()
    wiring = {
        "vocab_size": target.vocab_size,
        "loss": loss,
        "optim": optim,
        "signal": spec,
        "total_steps": total_steps,
        "target": target,
    }
    if isinstance(draft, EagleHead) and draft.config.version == 1:
        module: Distiller = Eagle1Distiller(draft, **wiring)
    elif isinstance(draft, EagleHead):
        module = Eagle3Distiller(draft, **wiring, **simulation, metrics_every=trainer.log_every_steps)
    elif isinstance(draft, MedusaHeads):
        decay = simulation["decay"]
        module = MedusaDistiller(draft, **wiring, decay=decay, metrics_every=trainer.log_every_steps)
    else:
        module = Distiller(draft, **wiring)
    metrics = Metrics(every=trainer.log_every_steps, extra=extra)
    average = WeightAverage(optim.ema_decay) if optim.ema_decay is not None else None
    state = StateCheckpoint(
        folder.checkpoint, every_minutes=trainer.checkpoint_every_minutes, every_steps=trainer.checkpoint_every_steps
    )
    snapshots = []
    if trainer.snapshot_every_steps:
        snapshots = [Snapshots(folder.path / "snapshots", trainer.snapshot_every_steps, average)]
    callbacks = [
        metrics,
        *([average] if average else []),
        *snapshots,
        state,
    ]  # the state last: it holds what the others did
    if start.step == total_steps:  # ended before its draft was saved
        restored = read_checkpoint(start.checkpoint)
        module.load_state_dict(restored["state_dict"])
        for callback in (metrics, *([average] if average else [])):
            callback.load_state_dict(restored["callbacks"][callback.state_key])
        is_first_rank = rank_zero_only.rank == 0
    else:
        if start.step is not None:
            say(f"run {folder.name}: continues at step {start.step} of {total_steps}")
        engine = trainer.make(device=device, total_steps=total_steps, callbacks=callbacks, loggers=loggers)
        with fast_fp32(device):
            engine.fit(module, datamodule=data, ckpt_path=start.checkpoint, weights_only=True)
        is_first_rank = engine.is_global_zero
    draft.to(target.device)
    if average is not None:
        average.average = [a.to(target.device) for a in average.average]
        average.swap(module)
    figures = (
        {f"train/{name}": value for name, value in module.last_window.means().items()} if module.last_window else {}
    )
    if module.validation is not None:
        figures |= {f"val/{name}": value for name, value in module.validation.means().items()}
    figures["train/tokens"] = metrics.tokens
    return {"steps": total_steps, "seconds": time.monotonic() - began, "metrics": figures}, is_first_rank


def judge(cfg: DictConfig, folder: RunFolder, target: Target, rows: Rows) -> dict[str, Metric]:
    """Expected acceptance of the draft as saved, merged into outputs/<run>/results.json."""
    draft = load_for(target, folder.path)
    pair = Pair(target, draft, name=folder.name, draft_name=folder.name, config=cfg, run=None)
    # figures of a former draft of this name are stale now
    return evaluate_pair(pair, cfg.alpha, rows=rows, seed=cfg.seed, output_root=cfg.output_root, overwrite=True)


def is_head(cfg: DictConfig) -> bool:
    return cfg.draft.kind in ("eagle3", "eagle1", "medusa")


def simulated_depth(cfg: DictConfig) -> dict[str, Any]:
    """How deep a batch drafts behind each slot, and how each next token weighs: {steps, decay}; {} for one token."""
    if cfg.draft.kind == "medusa":
        return {"steps": cfg.draft.num_heads, "decay": cfg.draft.decay}
    return dict(cfg.draft.simulation) if cfg.draft.kind == "eagle3" else {}


def check_head(cfg: DictConfig) -> None:
    """A head's needs, told before anything is loaded; its own keys are checked by eval/settings.py."""
    if cfg.draft.kind == "none":
        raise UserError("draft=none: nothing to train; use draft=gpt2_30m, or draft=eagle3 for a head")
    if is_head(cfg) and cfg.cache.signal != "hidden":
        raise UserError(f"cache.signal={cfg.cache.signal}: draft={cfg.draft.kind} learns from cache=hidden; set it so")
    if not is_head(cfg):
        return
    if cfg.draft.kind == "eagle3" and cfg.draft.simulation is None:
        raise UserError("draft.simulation=null: draft=eagle3 is trained by it; set it to {steps: 7, decay: 0.8}")
    if cfg.draft.kind == "eagle1" and cfg.draft.train_lm_head:
        raise UserError("draft.train_lm_head=true: draft=eagle1 has no head of its own; set it to false")
    if cfg.draft.kind == "eagle3" and cfg.target.tap_ids is None:
        raise UserError("target.tap_ids=null: draft=eagle3 reads taps of the target; set target.tap_ids=default")


def say_unservable(
    target: Target, kind: str, draft_config: Any = None, *, tap_ids: tuple[int, ...] | None = None
) -> None:
    """A warning for each engine that could not serve such a draft: better before its training than after."""
    for line in unservable_lines(target.config, kind, draft_config=draft_config, tap_ids=tap_ids):
        say(f"warning: {line}")


def build_head(
    cfg: DictConfig, target: Target, rows: dict[str, Rows]
) -> tuple[EagleHead | MedusaHeads, dict[str, float]]:
    """The head, its draft vocabulary chosen by the training rows; and how much of each split that covers."""
    for split, each in rows.items():
        if not PackedRows(each).slot_counts(1).any():
            raise UserError(
                f"data.max_length={cfg.data.max_length}: no {split} row has two supervised tokens side by side behind "
                f"another one, so a head finds nothing to draft there; raise it, or give longer texts"
            )
    size = cfg.draft.draft_vocab_size
    if size is None or size >= target.vocab_size:
        return instantiate(cfg.draft, target=target, seed=cfg.seed), {}
    ids = frequent_ids(rows["train"], size, target.vocab_size)
    draft = instantiate(cfg.draft, target=target, seed=cfg.seed, draft_vocab=torch.from_numpy(ids))
    ids = draft.draft_vocab.numpy()  # with draft.init those of the head there
    covered = {f"draft_vocab/coverage_{split}": coverage(each, ids) for split, each in rows.items()}
    shares = ", ".join(f"{value:.2%} of {name.rsplit('coverage_')[1]}" for name, value in covered.items())
    say(f"draft vocabulary: {size:,} of {target.vocab_size:,} ids, {shares} tokens that count")
    return draft, covered


def some_taps(
    target: Target,
    source: Rows | Path,
    spec: SignalSpec,
    *,
    num_rows: int = 64,
    max_tokens: int = 16_384,
    batch_tokens: int = 2048,
) -> Tensor:  # (n, L, D) bf16, on the CPU
    """Taps of the supervised tokens of the first training rows: what the head's input is like.

    max_tokens: of all these rows; batch_tokens: of those that the target reads at once. One row may be longer.
    """
    packed = PackedRows(source)
    lengths = packed.row_lengths()[:num_rows]
    lengths = lengths[: max(1, np.searchsorted(lengths.cumsum(), max_tokens, side="right"))]
    in_order = BatchStream(lengths, batch_tokens=max(batch_tokens, int(lengths.max())), seed=0, shuffle=False)
    taps = []
    for numbers in in_order.epoch(0):
        batch = packed[Item(numbers)]
        if "taps" not in batch:
            batch |= target_columns(target, batch["input_ids"], batch["row_offsets"], spec)
        taps.append(batch["taps"].cpu()[batch["loss_mask"]])
    return torch.cat(taps)


def check_lengths(cfg: DictConfig, trainer: TrainerSpec) -> None:
    """A row must fit in the draft's positions and in a batch."""
    if cfg.draft.kind == "gpt2" and cfg.data.max_length > cfg.draft.n_positions:
        raise UserError(too_long(cfg.data.max_length, cfg.draft.n_positions))
    if cfg.data.max_length > trainer.batch_tokens:
        raise UserError(
            f"trainer.batch_tokens={trainer.batch_tokens}: a batch must hold a row of data.max_length="
            f"{cfg.data.max_length} tokens; raise it"
        )


def too_long(max_length: int, positions: int) -> str:
    return f"data.max_length={max_length}: the draft has {positions} positions; set data.max_length={positions} or less"


def run_name(cfg: DictConfig) -> str:
    """cfg.run, or the experiment and the seed; in a sweep also what it varies, so that each job has its own folder."""
    if not HydraConfig.initialized():
        return cfg.run or f"run-s{cfg.seed}"
    hydra = HydraConfig.get()
    name = cfg.run or f"{hydra.runtime.choices.get('experiment') or 'run'}-s{cfg.seed}"
    if hydra.mode == RunMode.MULTIRUN:
        varied = swept_keys(sys.argv[1:]) - {"run", "experiment"}
        name = "-".join([name, *(o.lstrip("+") for o in hydra.overrides.task if o.lstrip("+").split("=")[0] in varied)])
    return re.sub(r"[^\w.=+,-]+", "_", name)[:200]


def swept_keys(arguments: list[str]) -> set[str]:
    """Keys that a command line gives several values: {"optim.lr"} of `-m optim.lr=1e-3,1e-4 seed=1`."""
    overrides = [a for a in arguments if "=" in a and not a.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(overrides)
    return {override.key_or_group for override in parsed if override.is_sweep_override()}


def refuse_distributed_sweep(num_processes: int) -> None:
    """Lightning starts its other processes with the command line of the first one: they would rerun the whole sweep."""
    if num_processes > 1 and HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError(
            f"trainer.devices: a sweep (-m) with {num_processes} processes a job is not supported; run the jobs one "
            f"by one, or set trainer.devices=1"
        )


@entry("distill")
def main(cfg: DictConfig) -> None:
    distill(cfg)


if __name__ == "__main__":
    main()
