"""results.json and runs on disk: merging, locking, refusing another model's figures, finding a run."""

import json
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from eval.results import HEADER_KEYS, Metric, git_sha, make_header, makers, merge_results, read_results, run_info
from eval.run import find_run, load_run, run_config
from models.errors import UserError


def header(draft: str = "d0", **data: str) -> dict:
    return make_header(
        device=torch.device("cpu"),
        dtype=torch.float32,
        target={"target_weights": "t0"},
        draft={"weights": draft},
        data=data,
    )


def test_file_has_the_documented_form(tmp_path):
    metrics = {"tau/mt_bench/T0/chain_k4": Metric.of((1.5, 1.25, 1.75), 20), "rounds": Metric(12)}
    path = merge_results(tmp_path / "deep" / "results.json", header(held_out="x"), metrics)
    results = json.loads(path.read_text())
    assert set(HEADER_KEYS) <= results.keys()
    assert results["metrics"]["tau/mt_bench/T0/chain_k4"] == {"value": 1.5, "ci95": [1.25, 1.75], "n": 20}
    assert results["metrics"]["rounds"] == {"value": 12, "ci95": None, "n": 1}
    assert results["device"].endswith("threads") and results["dtype"] == "float32"
    assert results["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (
        os.listdir(path.parent) == sorted([".results.json.lock", "results.json"]) or len(os.listdir(path.parent)) == 2
    )  # no temporary file is left


def test_merge_keeps_other_keys_and_replaces_its_own(tmp_path):
    path = tmp_path / "results.json"
    merge_results(path, header(held_out="x"), {"a": Metric(1.0), "b": Metric(2.0)})
    merge_results(path, header(mt_bench="y"), {"b": Metric(3.0), "c": Metric(4.0)})
    results = read_results(path)
    assert {key: metric["value"] for key, metric in results["metrics"].items()} == {
        "a": 1.0,
        "b": 3.0,
        "c": 4.0,
    }
    assert results["data"] == {"held_out": "x", "mt_bench": "y"}
    assert [merge["keys"] for merge in results["merges"]] == [["a"], ["b", "c"]]
    made_by = {key: results[key] for key in ("command", "git_sha", "device", "dtype")}
    assert makers(results, ["a", "c"]) == [made_by, made_by] and makers(results, ["b"]) == [made_by]
    assert makers({**results, "merges": []}, ["a"]) == [made_by]


def test_nan_becomes_null(tmp_path):
    path = merge_results(tmp_path / "r.json", header(), {"a": Metric(float("nan"), (float("nan"), float("inf")), 0)})
    assert read_results(path)["metrics"]["a"] == {"value": None, "ci95": [None, None], "n": 0}


def test_another_draft_is_refused_unless_overwrite(tmp_path):
    path = tmp_path / "results.json"
    merge_results(path, header("d0"), {"a": Metric(1.0)})
    with pytest.raises(UserError, match=r"d0.*d1.*overwrite=true"):
        merge_results(path, header("d1"), {"b": Metric(2.0)})
    assert list(read_results(path)["metrics"]) == ["a"]
    for name in ("generations.html", "decode.json", "metrics.csv"):
        (tmp_path / name).write_text("of d0")
    merge_results(path, header("d0"), {"b": Metric(2.0)}, overwrite=True)
    assert (tmp_path / "generations.html").exists() and len(read_results(path)["metrics"]) == 2  # the same draft
    merge_results(path, header("d1"), {"b": Metric(2.0)}, overwrite=True)
    assert list(read_results(path)["metrics"]) == ["b"]
    assert [p.name for p in tmp_path.iterdir() if p.suffix in (".html", ".json", ".csv")] == [
        "metrics.csv",
        "results.json",
    ]


def test_a_foreign_file_is_never_replaced_silently(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("{broken")
    with pytest.raises(UserError, match="no results file"):
        merge_results(path, header(), {"a": Metric(1.0)})
    assert path.read_text() == "{broken"
    with pytest.raises(UserError, match=r"eval\.alpha"):
        read_results(tmp_path / "none.json")


def _merge_many(path: str, name: str) -> None:
    for i in range(25):
        merge_results(path, header(), {f"{name}/{i}": Metric(float(i))})


def test_concurrent_merges_lose_nothing(tmp_path):
    path = str(tmp_path / "results.json")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_merge_many, args=(path, name)) for name in ("left", "right")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert len(read_results(path)["metrics"]) == 50


def test_git_sha_says_dirty_and_unknown(tmp_path):
    def git(*arguments: str) -> str:
        options = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
        run = subprocess.run(["git", *options, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return run.stdout.strip()

    assert git_sha(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert git_sha(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert git_sha(tmp_path) == git("rev-parse", "HEAD") + "-dirty"
    (tmp_path / "inner").mkdir()
    assert git_sha(tmp_path / "inner") == "unknown"  # somebody else's repository around us


def test_run_info_names_no_interpreter_path():
    info = run_info()
    assert info["command"].startswith("python ")
    assert {"python", "torch", "transformers", "lightning"} <= info["versions"].keys()


# Runs on disk


def make_run(root: Path, name: str, *, age: float = 0.0, **data: object) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    config = {
        "run": name, "dtype": "float32",
        "target": {"source": "random:tiny_llama", "revision": None, "device": "cuda"},
        "data": {"max_length": 64, "seed": 5, **data}, "alpha": {"max_tokens": 1},
    }  # fmt: skip
    OmegaConf.save(config, folder / "resolved_config.yaml")
    (folder / "run.json").write_text(json.dumps({"command": "x", "metrics": {}}))
    os.utime(folder / "run.json", (1e9 - age, 1e9 - age))
    return folder


CFG = OmegaConf.create(
    {
        "run": None, "dtype": "auto", "device": "cpu",
        "target": {"source": "gpt2", "revision": None, "device": "${device}"},
        "data": {"max_length": 512, "seed": 0}, "alpha": {"max_tokens": 50},
    }
)  # fmt: skip
OmegaConf.set_struct(CFG, True)


def test_find_run_by_age_name_and_path(tmp_path):
    old = make_run(tmp_path, "old", age=100)
    new = make_run(tmp_path, "new")
    (tmp_path / "unfinished").mkdir()
    assert find_run(None, tmp_path) == new
    assert find_run("old", tmp_path) == old
    assert find_run(str(old), "elsewhere") == old
    with pytest.raises(UserError, match=r"run=nope.*new, old"):
        find_run("nope", tmp_path)
    with pytest.raises(UserError, match="not finished"):
        find_run("unfinished", tmp_path)
    with pytest.raises(UserError, match=r"checkpoint_root=.*train one first"):
        find_run(None, tmp_path / "empty")


def test_a_snapshot_is_judged_with_the_target_and_the_data_of_its_run(tmp_path):
    """Also while the run still trains; its results get a folder of their own."""
    run = make_run(tmp_path, "mine")
    for _ in ("finished", "still trains"):
        for step in ("step-000002", "step-000004"):
            (run / "snapshots" / step).mkdir(parents=True, exist_ok=True)
            (run / "snapshots" / step / "config.json").write_text("{}")
        snapshot = run / "snapshots" / "step-000004"
        assert find_run(str(snapshot), "elsewhere") == find_run("mine/snapshots/step-000004", tmp_path) == snapshot
        assert load_run(snapshot).name == "mine-step-000004" and load_run(snapshot).config.data.seed == 5
        config = run_config(CFG, snapshot, ["alpha.max_tokens=50"])
        assert config.target.source == "random:tiny_llama" and config.run == "mine-step-000004"
        for name in ("mine/snapshots/step-000003", str(run / "snapshots" / "step-4")):
            with pytest.raises(UserError, match=rf"^run={name}: no such snapshot; .* the last is run={snapshot}$"):
                find_run(name, tmp_path)
        for name in ("mine/snapshots", str(run / "state")):
            (run / "state").mkdir(exist_ok=True)
            with pytest.raises(UserError, match=rf"^run={name}: a folder inside a run; give run={run}; or judge"):
                find_run(name, tmp_path)
        (run / "run.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match=rf"^run=mine: no run\.json there.*run={snapshot}$"):
        find_run("mine", tmp_path)


def test_load_run_says_what_is_broken(tmp_path):
    folder = make_run(tmp_path, "a")
    assert load_run(folder).config.data.seed == 5 and load_run(folder).name == "a"
    for broken in ("{", "[]", ""):
        (folder / "run.json").write_text(broken)
        with pytest.raises(UserError, match="run="):
            load_run(folder)
    (folder / "run.json").write_text("{}")
    for broken in ("{: [", "- a", ""):
        (folder / "resolved_config.yaml").write_text(broken)
        with pytest.raises(UserError, match=r"resolved_config\.yaml.*overwrite=true"):
            load_run(folder)


def test_run_config_takes_the_runs_target_and_data_but_the_command_line_wins(tmp_path):
    folder = make_run(tmp_path, "a")
    plain = run_config(CFG, folder, ["alpha.max_tokens=50", "+experiment=other"])
    assert plain.target.source == "random:tiny_llama" and plain.dtype == "float32" and plain.run == "a"
    assert plain.data == {"max_length": 64, "seed": 5}
    assert plain.alpha.max_tokens == 50 and plain.target.device == plain.device == "cpu"
    one_key = run_config(CFG, folder, ["data.seed=0"])
    assert one_key.data == {"max_length": 64, "seed": 0}
    assert run_config(CFG, folder, ["target=gpt2"]).target.source == "gpt2"
    assert CFG.run is None and CFG.target.source == "gpt2"  # the input is untouched
