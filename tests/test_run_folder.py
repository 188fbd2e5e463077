"""checkpoints/<run>: what overwriting a run must not delete, and what a continuation leaves the same."""

# ruff: noqa: F811 (cache_root is a fixture of test_distill)

import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_distill import cache_root, run, start  # noqa: F401

from models.errors import UserError
from train.run_folder import RunFolder, Start


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_overwriting_deletes_nothing_that_the_new_run_begins_with(tmp_path: Path, cache_root: Path) -> None:
    folder = run(tmp_path, cache_root, "trainer.max_steps=2", "trainer.snapshot_every_steps=2")
    before, link = files(folder), tmp_path / "link.ckpt"
    link.symlink_to(folder / "state" / "last.ckpt")
    for value in (folder / "state" / "last.ckpt", link):
        with pytest.raises(UserError, match=rf"^resume={value}: overwrite=true would delete it .*another run=NAME"):
            run(tmp_path, cache_root, "trainer.max_steps=4", "overwrite=true", f"resume={value}")
    for key, config in (
        ("draft.init", {"draft": {"init": str(folder)}}),
        ("draft.id", {"draft": {"id": str(folder / "snapshots" / "step-000002")}}),
        ("data.sources.0.path", {"data": {"sources": [{"path": str(folder / "config.json")}]}}),
    ):
        with pytest.raises(UserError, match=rf"^{key}={folder}.*: overwrite=true would delete it"):
            RunFolder(tmp_path / "checkpoints", "a").check(config, resume="auto", overwrite=True)
    assert files(folder) == before


def test_a_checkpoint_of_the_run_continues_it_and_another_run_may_begin_with_it(tmp_path: Path) -> None:
    state = tmp_path / "a" / "state" / "last.ckpt"
    RunFolder(tmp_path, "a").begin({"seed": 1}, overwrite=False)
    torch.save({"global_step": 2, "state_dict": {}, "loops": {}}, state)
    RunFolder(tmp_path, "b").begin({"seed": 1}, overwrite=False)
    for name, overwrite in (("a", False), ("b", False), ("b", True), ("new", True)):
        folder, config = RunFolder(tmp_path, name), {"seed": 1, "run": name, "checkpoint_root": str(tmp_path)}
        assert folder.check(config, resume=str(state), overwrite=overwrite) == Start(state, 2)
    config = {"seed": 1, "cache_root": str(tmp_path / "a" / "cache"), "name": "x" * 5000, "draft": {"init": "scratch"}}
    assert RunFolder(tmp_path, "a").check(config, resume="auto", overwrite=True) == Start()  # no cache there yet


@pytest.mark.slow
@pytest.mark.parametrize("ema", ["0.9", "null"])
def test_stopped_by_sigterm_it_leaves_the_snapshots_and_weights_of_an_uninterrupted_run(
    tmp_path: Path, cache_root: Path, one_thread: None, ema: str
) -> None:
    more = ("trainer.max_epochs=6", "trainer.snapshot_every_steps=1", f"optim.ema_decay={ema}")
    first = start(tmp_path, cache_root, *more)
    snapshots, deadline = tmp_path / "checkpoints" / "a" / "snapshots", time.monotonic() + 300
    while not (snapshots / "step-000004").is_dir():
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()[1]
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=300)
    assert first.returncode == 143 and "the same command continues" in out, err
    stopped_at = torch.load(snapshots.parent / "state" / "last.ckpt", weights_only=True)["global_step"]
    assert sorted(path.name for path in snapshots.iterdir())[-1] == f"step-{stopped_at:06d}"
    folders = [run(tmp_path, cache_root, *more, name=name) for name in ("straight", "a")]
    straight, resumed = (
        {str(path.relative_to(folder)): load_file(path) for path in folder.rglob("*.safetensors")} for folder in folders
    )
    assert straight.keys() == resumed.keys() and stopped_at < len(straight) - 1
    assert not list(folders[1].rglob("*partial*"))
    for file, weights in straight.items():
        assert all(torch.equal(tensor, resumed[file][name]) for name, tensor in weights.items()), file


def test_snapshots_may_begin_in_a_continuation(tmp_path: Path) -> None:
    config = {"run": "a", "trainer": {"max_steps": 4, "snapshot_every_steps": None}}
    RunFolder(tmp_path, "a").begin(config, overwrite=False)
    config = {"run": "a", "trainer": {"max_steps": 4, "snapshot_every_steps": 2}}
    assert RunFolder(tmp_path, "a").check(config, resume="auto", overwrite=False) == Start()
