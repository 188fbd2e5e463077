"""Distillation end to end on a tiny random target: what a run leaves, resume, token means, processes, loggers."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

import train.cache
import train.distill
from data.datamodule import Item, PackedDataModule, PackedRows
from data.rows import Rows
from data.signals import SignalSpec
from eval.entry import CONF_DIR
from eval.plots import read_metrics_csv
from models.drafts import gpt2_draft
from models.errors import UserError
from models.target import Target
from models.tiny import byte_tokenizer, random_model
from train.callbacks import StateCheckpoint
from train.distill import distill
from train.losses import LOSSES, LossSpec
from train.module import Distiller, OptimSpec, make_optimizer
from train.run_folder import RunFolder, differences
from train.trainer import TrainerSpec, fast_fp32

TINY = [
    "+experiment=smoke",
    "data.max_train_tokens=6000",
    "data.max_held_out_tokens=1500",
    "data.held_out_fraction=0.1",
    "data.max_length=64",
    "trainer.max_epochs=1",
    "trainer.batch_tokens=256",
    "trainer.accumulate=2",
    "trainer.log_every_steps=1",
    "trainer.val_every_steps=4",
    "alpha.max_tokens=200",
    "draft.n_embd=32",
    "cache.shard_tokens=4096",
]


def overrides(root: Path, cache_root: Path, *more: str, run: str = "a") -> list[str]:
    """One text and one cache for all tests; checkpoints and outputs of a test in its own folder."""
    return [
        *TINY,
        *more,
        f"run={run}",
        f"data.sources=[{{path: {cache_root / 'texts.jsonl'}, kind: text}}]",
        f"cache_root={cache_root}",
        f"checkpoint_root={root / 'checkpoints'}",
        f"output_root={root / 'outputs'}",
    ]


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a text of 60 short documents."""
    folder = tmp_path_factory.mktemp("cache")
    words = ["draft", "target", "token", "accepts", "the", "a", "of", "rejects"]
    generator = random.Random(0)
    lines = [" ".join(generator.choices(words, k=generator.randint(5, 60))) for _ in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder


def run(root: Path, cache_root: Path, *more: str, name: str = "a") -> Path:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("distill", overrides=overrides(root, cache_root, *more, run=name))
    return distill(cfg)


def run_into_a_crash(at: int, root: Path, cache_root: Path, *more: str, name: str) -> None:
    """`run`, stopped before micro-batch `at`."""
    step = Distiller.training_step

    def crash(self: Distiller, batch: dict, index: int) -> torch.Tensor:
        if index == at:
            raise RuntimeError("power cut")
        return step(self, batch, index)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(Distiller, "training_step", crash)
        run(root, cache_root, *more, name=name)


def start(root: Path, cache_root: Path, *more: str, name: str = "a", flags: tuple = ()) -> subprocess.Popen:
    command = [sys.executable, "-m", "train.distill", *flags, *overrides(root, cache_root, *more, run=name)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=CONF_DIR.parent, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same_weights(folder: Path, other: Path, atol: float) -> None:
    ours, theirs = weights(folder), weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def test_a_run_leaves_all_that_it_promises(tmp_path: Path, cache_root: Path, capsys: pytest.CaptureFixture) -> None:
    folder = run(tmp_path, cache_root)
    assert AutoTokenizer.from_pretrained(folder)("ab").input_ids
    info = json.loads((folder / "run.json").read_text())
    assert {"command", "git_sha", "versions", "metrics", "target", "data", "steps"} <= info.keys()
    assert info["target"]["target_weights"] and info["metrics"]["alpha_expected/held_out/T1"] > 0
    assert not list(folder.glob("**/*partial*"))
    config = (folder / "resolved_config.yaml").read_text()
    assert "${" not in config and "n_embd: 32" in config
    saved = torch.load(folder / "state" / "last.ckpt", weights_only=True)
    assert all(name.startswith("draft.") for name in saved["state_dict"])
    assert saved["global_step"] == info["steps"]
    columns = read_metrics_csv(tmp_path / "outputs" / "a" / "metrics.csv")
    assert {"train/loss", "train/kl", "train/alpha", "train/lr", "train/tokens", "train/tokens_per_s"} <= columns.keys()
    assert {"val/alpha", "val/kl", "cache/tokens", "eval/alpha_expected/held_out/T1"} <= columns.keys()
    assert len(columns["train/loss"]) == info["steps"]
    assert columns["train/loss"][-1, 1] < columns["train/loss"][0, 1]
    assert (tmp_path / "outputs" / "a" / "results.json").is_file()

    written = (folder / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert run(tmp_path, cache_root) == folder  # the same once more
    assert "finished before" in capsys.readouterr().out
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(UserError, match=r"optim\.lr was 0\.001, now 0\.01"):
        run(tmp_path, cache_root, "optim.lr=0.01")
    assert (folder / "run.json").is_file()
    run(tmp_path, cache_root, "optim.lr=0.01", "overwrite=true")
    assert (folder / "model.safetensors").stat().st_mtime_ns > written


@pytest.mark.parametrize("crash_at", [7, 10])  # micro-batches: between the two of a window, and at the start of one
def test_crashed_and_resumed_equals_uninterrupted(tmp_path: Path, cache_root: Path, crash_at: int) -> None:
    more = ("optim.ema_decay=0.9", "trainer.checkpoint_every_steps=2", "trainer.num_workers=1")
    straight = run(tmp_path, cache_root, *more, name="straight")
    run_into_a_crash(crash_at, tmp_path, cache_root, *more, name="resumed")
    saved = tmp_path / "checkpoints" / "resumed" / "state" / "last.ckpt"
    assert 0 < torch.load(saved, weights_only=True)["global_step"] <= crash_at // 2
    assert not (saved.parents[1] / "run.json").exists()
    resumed = run(tmp_path, cache_root, *more, name="resumed")
    assert_same_weights(straight, resumed, 1e-6)
    first, second = (read_metrics_csv(tmp_path / "outputs" / name / "metrics.csv") for name in ("straight", "resumed"))
    for name in ("train/loss", "train/lr", "train/grad_norm", "train/tokens", "val/alpha", "val/kl"):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(second[name]), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_continues(tmp_path: Path, cache_root: Path, one_thread: None) -> None:
    more = ("trainer.max_epochs=8",)
    process = start(tmp_path, cache_root, *more)
    log = tmp_path / "outputs" / "a" / "metrics.csv"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.read_text().count("\n") > 8):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and time.monotonic() - sent < 30, err
    assert "the same command continues" in out and "Traceback" not in err
    state = torch.load(tmp_path / "checkpoints" / "a" / "state" / "last.ckpt", weights_only=True)
    assert state["global_step"] >= 6
    resumed = run(tmp_path, cache_root, *more)
    straight = run(tmp_path, cache_root, *more, name="straight")
    assert_same_weights(straight, resumed, 1e-6)


def test_ended_before_its_draft_was_saved(tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "save_draft", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, cache_root, "optim.ema_decay=0.5")
    monkeypatch.undo()
    monkeypatch.setattr(Distiller, "training_step", lambda *_: 1 / 0)  # nothing is trained again
    finished = run(tmp_path, cache_root, "optim.ema_decay=0.5")
    monkeypatch.undo()
    assert_same_weights(finished, run(tmp_path, cache_root, "optim.ema_decay=0.5", name="straight"), 0.0)


def test_a_longer_run_stretches_the_schedule(tmp_path: Path, cache_root: Path) -> None:
    first = run(tmp_path, cache_root, "trainer.max_steps=4")
    assert json.loads((first / "run.json").read_text())["steps"] == 4
    run(tmp_path, cache_root, "trainer.max_steps=8")
    assert json.loads((first / "run.json").read_text())["steps"] == 8
    columns = read_metrics_csv(tmp_path / "outputs" / "a" / "metrics.csv")
    assert columns["train/loss"][:, 0].tolist() == list(range(1, 9))


def test_a_run_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path, "a"), RunFolder(tmp_path, "a")
    first.begin({}, overwrite=False)
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"run=a: another process is training it"):
            second.begin({}, overwrite=overwrite)
    assert (tmp_path / "a" / "resolved_config.yaml").is_file()
    first.release()
    second.begin({}, overwrite=True)
    second.release()


def test_a_state_of_another_draft_or_of_nothing(tmp_path: Path, cache_root: Path) -> None:
    state = run(tmp_path, cache_root, "trainer.max_steps=2") / "state" / "last.ckpt"
    with pytest.raises(UserError, match=r"resume: the checkpoint holds another draft .*no such weight"):
        run(tmp_path, cache_root, "trainer.max_steps=4", "draft.n_layer=3", f"resume={state}", name="b")
    torch.save({"a": 1}, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="is no state of a run"):
        run(tmp_path, cache_root, f"resume={tmp_path / 'other.ckpt'}", name="c")


def test_resume_values(tmp_path: Path, cache_root: Path) -> None:
    folder = run(tmp_path, cache_root, "trainer.max_steps=4")
    with pytest.raises(UserError, match=r"resume=never.*overwrite=true"):
        run(tmp_path, cache_root, "trainer.max_steps=4", "resume=never")
    with pytest.raises(UserError, match=r"resume=no/such\.ckpt: no such file"):
        run(tmp_path, cache_root, "resume=no/such.ckpt")
    (folder / "run.json").unlink()
    checkpoint = folder / "state" / "last.ckpt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"last\.ckpt cannot be read.*overwrite=true"):
        run(tmp_path, cache_root, "trainer.max_steps=4")


@pytest.mark.parametrize("experiment", ["gpt2_30m", "gpt2_medium_small"])
def test_the_hub_experiments_run_on_a_target_of_their_shape(experiment: str, tmp_path: Path, cache_root: Path) -> None:
    """What needs network and a GPU, with a tiny GPT-2 in the target's place and a text of ours in the corpus'."""
    small = {
        "gpt2_30m": ["draft.n_layer=1", "draft.n_head=2", "draft.n_embd=32", "draft.n_positions=128"],
        "gpt2_medium_small": [f"draft.id={tmp_path / 'off-the-shelf'}"],
    }[experiment]
    random_model("tiny_gpt2", seed=1).save_pretrained(tmp_path / "off-the-shelf")
    byte_tokenizer().save_pretrained(tmp_path / "off-the-shelf")
    ours = [o for o in overrides(tmp_path, cache_root, *small, run=experiment) if o not in TINY]
    limits = [o for o in TINY if o.startswith(("data.", "trainer.", "alpha."))]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose(
            "distill", [f"+experiment={experiment}", "target.source=random:tiny_gpt2", "dtype=fp32", *limits, *ours]
        )
    info = json.loads((distill(cfg) / "run.json").read_text())
    assert info["target"]["name"].startswith("gpt2") and info["metrics"]["alpha_expected/held_out/T1"] > 0.05


def test_val_alpha_is_the_alpha_of_the_whole_distribution(tmp_path: Path, cache_root: Path) -> None:
    """Trained from the top 4 of 259 ids, whose tail would hide most of the overlap, validation still says the truth."""
    folder = run(
        tmp_path,
        cache_root,
        "cache.top_k=4",
        "trainer.max_steps=3",
        "trainer.val_every_steps=3",
        "alpha.max_tokens=null",
    )
    metrics = json.loads((folder / "run.json").read_text())["metrics"]
    assert metrics["val/alpha"] == pytest.approx(metrics["alpha_expected/held_out/T1"], abs=1e-4)
    assert metrics["val/kl"] == pytest.approx(metrics["kl/held_out"], abs=1e-3)


def test_online_training_equals_cached(tmp_path: Path, cache_root: Path) -> None:
    for signal_name in ("topk", "hidden"):
        more = (f"cache.signal={signal_name}", "trainer.max_steps=3")
        cached = run(tmp_path, cache_root, *more, name=f"cached-{signal_name}")
        online = run(tmp_path, cache_root, *more, "cache.mode=none", name=f"online-{signal_name}")
        assert_same_weights(cached, online, 1e-5)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path, cache_root: Path, one_thread: None) -> None:
    """Two gloo ranks of one batch a step see the batches of one process that accumulates two."""
    one = run(tmp_path, cache_root, "trainer.max_steps=6", name="one")
    (empty := tmp_path / "cache").mkdir()  # the two make the cache as well
    shutil.copy(cache_root / "texts.jsonl", empty)
    process = start(tmp_path, empty, "trainer.max_steps=6", "trainer.accumulate=1", "trainer.devices=2", name="two")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.count("saved to") == 1
    assert_same_weights(one, tmp_path / "checkpoints" / "two", 1e-5)
    first, second = (read_metrics_csv(tmp_path / "outputs" / name / "metrics.csv") for name in ("one", "two"))
    for name in ("train/loss", "train/tokens", "val/alpha"):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(second[name]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_sweep_has_a_folder_each_and_refuses_several_processes(tmp_path: Path, cache_root: Path) -> None:
    sweep = ("optim.lr=1e-3,1e-4", "trainer.max_steps=2", "logger=wandb")
    process = start(tmp_path, cache_root, *sweep, flags=("-m",))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert folders == ["a-optim.lr=0.0001", "a-optim.lr=0.001"]
    ids = {(tmp_path / "checkpoints" / name / "state" / "run_id").read_text() for name in folders}
    offline = [path.name for path in tmp_path.glob("outputs/*/wandb/offline-run-*")]
    assert {name.rsplit("-", 1)[1] for name in offline} == ids and len(ids) == 2
    process = start(tmp_path, cache_root, "optim.lr=1e-3,1e-4", "trainer.devices=2", flags=("-m",))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and "error: trainer.devices: a sweep" in err


def test_wandb_gets_the_config_first_and_resumes_quietly(
    tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    more = ("logger=wandb", "trainer.checkpoint_every_steps=2")
    step = Distiller.training_step

    def crash(self: Distiller, batch: dict, index: int) -> torch.Tensor:
        if index == 9:
            raise RuntimeError("power cut")
        return step(self, batch, index)

    monkeypatch.setattr(Distiller, "training_step", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        run(tmp_path, cache_root, *more)
    import wandb

    assert wandb.run is None
    monkeypatch.setattr(Distiller, "training_step", step)
    run(tmp_path, cache_root, *more)
    assert "must only increase" not in "".join(capfd.readouterr()).lower()
    folders = sorted((tmp_path / "outputs" / "a" / "wandb").glob("offline-run-*"))
    # two that begin within a second get -1 behind the id: offline-run-<time>-<id>[-1]
    assert len({folder.name.split("-")[3] for folder in folders}) == 1  # the same run
    content = b"".join(path.read_bytes() for path in folders[0].glob("*.wandb"))
    assert b"target_pca" in content or b"scratch" in content  # plain values, and no interpolation
    assert b"git_sha" in content and b"run_folder" in content and b"${" not in content


# --- the module alone ---------------------------------------------------------------------------------------------


@pytest.fixture
def rows() -> Rows:
    """Rows of 2, 10, 10, 10 and 10 tokens; all but the first of each supervised."""
    lengths = [2, 10, 10, 10, 10]
    offsets = np.cumsum([0, *lengths])
    ids = np.random.default_rng(0).integers(0, 256, offsets[-1]).astype(np.int32)
    mask = np.ones(offsets[-1], dtype=bool)
    return Rows(ids, mask, offsets, np.arange(len(lengths)))


class Recorder(Distiller):
    """Keeps the gradients that the optimiser gets."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.__dict__.setdefault("gradients", []).append([p.grad.clone() for p in self.draft.parameters()])


def gradients(target: Target, batches: list, *, accumulate: int, **optim: float) -> list[list[torch.Tensor]]:
    module = Recorder(
        gpt2_draft(259, n_layer=1, n_head=2, n_embd=16, n_positions=64),
        vocab_size=259,
        loss=LossSpec(),
        optim=OptimSpec(**{"lr": 1e-30, "clip": None, "warmup_fraction": 0.0, "weight_decay": 0.0, **optim}),
        signal=SignalSpec("topk", 8),
        total_steps=10,
        target=target,
    )
    trainer = lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=accumulate, logger=False, accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(module, loader)
    return module.gradients


def test_the_loss_is_a_mean_over_tokens_however_they_are_split(tiny_target: Target, rows: Rows) -> None:
    """One token in a micro-batch and nine in the next weigh as in one batch; so does a short last window."""
    packed = PackedRows(rows)
    a, b = (packed[Item(np.array([i]))] for i in (0, 1))
    both = packed[Item(np.array([0, 1]))]
    assert (int(a["pred_mask"].sum()), int(b["pred_mask"].sum())) == (1, 9)
    split, whole = gradients(tiny_target, [a, b], accumulate=2), gradients(tiny_target, [both], accumulate=1)
    for grad, expected in zip(split[0], whole[0]):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)
    windows = gradients(tiny_target, [b] * 5, accumulate=4)
    assert len(windows) == 2
    for grad, expected in zip(*windows):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


def test_clipping_is_of_the_token_mean(tiny_target: Target, rows: Rows) -> None:
    batch = PackedRows(rows)[Item(np.arange(5))]
    free = gradients(tiny_target, [batch], accumulate=1)[0]
    norm = torch.stack([g.norm() for g in free]).norm()
    clipped = gradients(tiny_target, [batch], accumulate=1, clip=float(norm) / 4)[0]
    torch.testing.assert_close(torch.stack([g.norm() for g in clipped]).norm(), norm / 4, rtol=1e-4, atol=0)


def test_the_target_stays_out_and_the_draft_trains(tiny_target: Target) -> None:
    draft = gpt2_draft(259, n_layer=1, n_head=2, n_embd=16, n_positions=64).eval()
    module = Distiller(
        draft, vocab_size=259, loss=LossSpec(), optim=OptimSpec(), signal=SignalSpec("hidden"), total_steps=1,
        target=tiny_target,
    )  # fmt: skip
    assert draft.training and all(name.startswith("draft.") for name in module.state_dict())
    module.train()
    assert not tiny_target.model.training
    optimised = {id(p) for group in module.configure_optimizers()["optimizer"].param_groups for p in group["params"]}
    assert optimised == {id(p) for p in draft.parameters()}
    assert not any(p.requires_grad for p in tiny_target.parameters())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["topk", "hidden"])
def test_every_loss_and_signal_goes_down(name: str, kind: str, tiny_target: Target, rows: Rows) -> None:
    data = PackedDataModule(rows, batch_tokens=64)
    batch = data.train_set[Item(np.arange(5))]
    module = Distiller(
        gpt2_draft(259, n_layer=1, n_head=2, n_embd=16, n_positions=64),
        vocab_size=259, loss=LossSpec(name), optim=OptimSpec(lr=1e-2), signal=SignalSpec(kind, 16), total_steps=10,
        target=tiny_target,
    )  # fmt: skip
    optimizer, losses = make_optimizer(module.draft, module.optim), []
    for _ in range(15):
        out = module.distill(batch, module.specs["train"])
        losses.append(out.loss_sum.item() / out.num_tokens)
        out.loss_sum.div(out.num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_schedule_and_weight_decay() -> None:
    optim = OptimSpec(lr=1.0, warmup_fraction=0.1, final_lr_fraction=0.2)
    factors = [optim.lr_factor(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1 and factors[100] == pytest.approx(0.2)
    assert factors[55] == pytest.approx(0.6) and factors == sorted(factors[:10]) + sorted(factors[10:], reverse=True)
    assert OptimSpec(schedule="constant").lr_factor(99, 100) == 1
    draft = gpt2_draft(100, n_layer=1, n_head=2, n_embd=16, n_positions=64)
    decayed, plain = (group["params"] for group in make_optimizer(draft, optim).param_groups)
    assert sum(p.numel() for p in decayed) == 12 * 16 * 16 and all(p.dim() == 2 for p in decayed)
    assert len(decayed) + len(plain) == len(list(draft.parameters()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimSpec(lr="fast"), r"optim\.lr=fast"),
        (lambda: OptimSpec(lr=0), r"optim\.lr=0"),
        (lambda: OptimSpec(schedule="step"), r"optim\.schedule=step"),
        (lambda: OptimSpec(betas=(0.9, 1.0)), r"optim\.betas"),
        (lambda: OptimSpec(ema_decay=1.0), r"optim\.ema_decay"),
        (lambda: TrainerSpec(max_epochs=-1), r"trainer\.max_epochs=-1"),
        (lambda: TrainerSpec(max_epochs=None), r"trainer\.max_epochs, trainer\.max_steps"),
        (lambda: TrainerSpec(precision="fp8"), r"trainer\.precision=fp8"),
        (lambda: TrainerSpec(devices="two"), r"trainer\.devices=two"),
        (lambda: TrainerSpec(devices=2).beside("auto"), r"trainer\.devices=2: .*set trainer\.devices=1"),
        (lambda: RunFolder("checkpoints", "../up"), r"run=\.\./up"),
    ],
)
def test_mistakes_name_key_value_and_fix(make, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_a_shorter_run_than_the_one_that_is_there_is_refused(tmp_path: Path, cache_root: Path) -> None:
    folder = run(tmp_path, cache_root, "trainer.max_steps=4")
    before = (folder / "run.json").read_bytes(), (folder / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"^trainer\.max_steps=2, .* end the run after 2 steps, and .* has 4 behind it"):
        run(tmp_path, cache_root, "trainer.max_steps=2")
    assert before == ((folder / "run.json").read_bytes(), (folder / "model.safetensors").read_bytes())


def test_settings_of_other_commands_do_not_make_another_run(tmp_path: Path, cache_root: Path) -> None:
    """Neither given anew, nor missing in a run that an earlier version wrote."""
    folder = run(tmp_path, cache_root, "trainer.max_steps=2")
    config = OmegaConf.load(folder / "resolved_config.yaml")
    for group in ("regenerate", "export", "tune", "compare", "failure"):
        del config[group]
    OmegaConf.save(config, folder / "resolved_config.yaml")
    begun = (folder / "run.json").stat().st_mtime_ns
    assert run(tmp_path, cache_root, "trainer.max_steps=2", "export.draft_len=2") == folder
    assert (folder / "run.json").stat().st_mtime_ns == begun  # finished before: nothing was done


def test_training_is_told_the_configured_device(tmp_path: Path, cache_root: Path, monkeypatch) -> None:
    """Not the target's own: that is always one GPU of those that `cuda` stands for, and one process would train."""
    asked = []

    def num_devices(self: TrainerSpec, device: torch.device) -> int:
        asked.append(device)
        return 1

    def make(self: TrainerSpec, *, device: torch.device, **more) -> lightning.Trainer:
        asked.append(device)
        return make_as_before(self, device=device, **more)

    make_as_before = TrainerSpec.make
    for module in (train.distill, train.cache):
        monkeypatch.setattr(module, "resolve_device", lambda name: torch.device("cpu", 0))
    monkeypatch.setattr(TrainerSpec, "num_devices", num_devices)
    monkeypatch.setattr(TrainerSpec, "make", make)
    run(tmp_path, cache_root, "trainer.max_steps=1")
    assert len(asked) >= 4 and set(asked) == {torch.device("cpu", 0)} != {torch.device("cpu")}


def test_fast_products_are_for_training_alone() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError), fast_fp32(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == "high"
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == before
    with fast_fp32(torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == before


def test_a_target_over_all_gpus_has_one_process_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    spec, gpu = TrainerSpec(), torch.device("cuda")
    assert spec.beside(None).num_devices(gpu) == 4
    assert spec.beside("auto").num_devices(gpu) == TrainerSpec(devices=1).beside("auto").num_devices(gpu) == 1


def test_differences_are_listed_by_leaf() -> None:
    before, after = {"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": 1, "c": [2], "e": {"f": 3}}}
    assert differences(before, after) == [("a.c", [1], [2]), ("a.e.f", None, 3), ("d", 2, None)]


def test_a_failed_save_keeps_the_former_state(tmp_path: Path) -> None:
    class Failing:
        is_global_zero, world_size = True, 1

        def save_checkpoint(self, path: Path) -> None:
            path.write_bytes(b"half")
            raise OSError("killed")

    state = StateCheckpoint(tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").write_bytes(b"whole")
    with pytest.raises(OSError):
        state.save(Failing())
    assert (tmp_path / "last.ckpt").read_bytes() == b"whole"
