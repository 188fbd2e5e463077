"""report.html: self-contained and well-formed, what is slower is said, files are found; and what W&B gets of it."""

import base64
import html
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import eval.html_report
import eval.plots
import eval.wandb_media
from eval.html_report import find_outputs, html_report, run_folder_of, write_report
from eval.html_tables import compare_table, sentences
from eval.html_view import html_view, page_parts
from eval.loop import DecodeResult, Round
from eval.measures import Method, Trial
from eval.prompts import Prompt
from eval.report import as_metrics, decoded, overall, vocabulary_lines
from eval.results import Metric, make_header, merge_results, read_results
from eval.tree import TreeShape
from eval.wandb_media import alpha_rows, decode_rows, fastest, log_to_wandb, summary
from models.errors import UserError
from models.tiny import byte_tokenizer

HOSTILE = "<script>alert('x')</script> & \x1b"


@pytest.fixture(autouse=True)
def _small_plots(monkeypatch):
    monkeypatch.setattr(eval.plots, "DPI", 30)


def figures() -> dict[str, Metric]:
    """Two methods, two temperatures, two sets: the tree is slower at T = 1, the chain on one set at T = 0."""
    speedups = {
        ("T0", "chain_k4"): {"all": 1.5, "gsm8k": 1.7, "mt_bench": 0.95},
        ("T0", "static_2x1"): {"all": 1.6, "gsm8k": 1.8, "mt_bench": 1.4},
        ("T1", "chain_k4"): {"all": 0.9, "gsm8k": 0.95, "mt_bench": 0.85},
        ("T1", "static_2x1"): {"all": 0.8, "gsm8k": 0.85, "mt_bench": 0.75},
    }
    metrics = {}
    for (temperature, method), of_sets in speedups.items():
        for name, speedup in of_sets.items():
            where = f"{name}/{temperature}/{method}"
            metrics[f"speedup/{where}"] = Metric(speedup, (speedup - 0.1, speedup + 0.1), 4)
            metrics[f"tau/{where}"] = Metric(2 * speedup, (speedup, 3 * speedup), 4)
            metrics[f"tree_nodes/{where}"] = Metric(4.0, (4.0, 4.0), 4)
            if method == "chain_k4":
                metrics[f"alpha/{where}"] = Metric(0.5, (0.4, 0.6), 4)
            for depth in (1, 2):
                for figure in ("alpha_at_depth", "survival_at_depth"):
                    metrics[f"{figure}/d{depth}/{where}"] = Metric(0.5 / depth, (0.2, 0.6), 4)
            if temperature == "T0":
                for what, value in (("differences", 1), ("failures", 0), ("gap_max", 0.125)):
                    metrics[f"greedy_{what}/{where}"] = Metric(value, None, 4)
    for temperature in ("T0", "T0.7", "T1", "T1.5"):
        metrics[f"alpha_expected/held_out/{temperature}"] = Metric(0.41, (0.4, 0.42), 9)
        metrics[f"alpha_expected/held_out/{temperature}/pos_0_64"] = Metric(0.51, (0.4, 0.6), 5)
        metrics[f"alpha_expected/held_out/{temperature}/pos_64_up"] = Metric(0.31, (0.2, 0.4), 4)
    return {**metrics, "kl/held_out": Metric(1.25, (1.0, 1.5), 9), "alpha_tokens/held_out": Metric(1234)}


def generations() -> str:
    """A page of eval.html_view over hostile text."""
    tokenizer = byte_tokenizer()
    ids = tokenizer(HOSTILE)["input_ids"]
    rounds = [Round(drafted=4, depth=4, judged=1, accepted=0, accepted_uncut=0) for _ in ids[1:]]
    result = DecodeResult(token_ids=ids, token_depth=[0] * len(ids), finish_reason="length", rounds=rounds, trees=[])
    method = Method(0.0, "chain_k4", TreeShape.parse("chain_k4"), "probabilistic")
    prompt = Prompt("gsm8k", "0", HOSTILE, (1,))
    return html_view(tokenizer, [prompt], {method: [Trial("gsm8k", "0", None, result)]}, title=HOSTILE)


def make_outputs(root: Path, name: str = "mine", *, metrics: dict[str, Metric] | None = None) -> Path:
    """outputs/<name> and checkpoints/<name> as training and decoding leave them."""
    folder, run_folder = root / "outputs" / name, root / "checkpoints" / name
    (run_folder / "state").mkdir(parents=True)
    header = make_header(
        device=torch.device("cpu"), dtype=torch.float32, target={"name": "tiny<target>"},
        draft={"name": name, "draft_weights": "d0"}, data={},
    )  # fmt: skip
    metrics = figures() if metrics is None else metrics
    held_out = {key: metric for key, metric in metrics.items() if "held_out" in key}
    merge_results(folder / "results.json", {**header, "command": "python -m eval.alpha <1>"}, held_out)
    others = {key: metric for key, metric in metrics.items() if key not in held_out}
    if others:
        merge_results(folder / "results.json", {**header, "command": "python -m eval.decode <2>"}, others)
    rows = [f"{step},{3 - step / 200},{step / 1000},{step * 100},{1 - step / 400}" for step in range(10, 210, 10)]
    (folder / "metrics.csv").write_text("\n".join(["step,train/loss,val/alpha,train/tokens,val/kl", *rows]) + "\n")
    (folder / "generations.html").write_text(generations())
    (run_folder / "resolved_config.yaml").write_text("optim:\n  lr: 0.003  # <b>\n")
    info = {
        "command": "python -m train.distill run=mine", "git_sha": "0123456789abcdef", "metrics": {}, "steps": 20,
        "seconds": 90.0, "device": "cpu", "precision": "fp32",
    }  # fmt: skip
    (run_folder / "run.json").write_text(json.dumps(info))
    (run_folder / "state" / "run_id").write_text("abcd1234")
    return folder


class Page(HTMLParser):
    """Tags balanced, all attributes, and the text outside of styles."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text = [], [], ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def test_the_page_has_all_of_a_run_and_needs_nothing_else(tmp_path):
    folder = make_outputs(tmp_path)
    paths = write_report(folder, run_folder=tmp_path / "checkpoints" / "mine")
    names = ["loss", "val_alpha", "by_temperature", "acceptance_by_depth", "alpha_by_depth"]
    assert [path.name for path in paths] == [*(f"{name}.png" for name in names), "report.html"]
    page = paths[-1].read_text()
    ElementTree.fromstring(page)
    parsed = Page(page)
    images = [attributes for tag, attributes in parsed.tags if tag == "img"]
    assert {image["alt"] for image in images} == set(names)
    assert all(image["src"].startswith("data:image/png;base64,iVBORw0KGgo") for image in images)
    tags = {tag for tag, _ in parsed.tags}
    assert not tags & {"script", "link", "iframe"}  # nothing from outside, and no text became markup
    anchors = {attributes["id"] for tag, attributes in parsed.tags if tag == "section"}
    links = [attributes["href"] for tag, attributes in parsed.tags if tag == "a"]
    assert links == [f"#{name}" for name in links_in_order()] and {link[1:] for link in links} == anchors
    assert not [1 for tag, attributes in parsed.tags if tag != "img" for name in attributes if name == "src"]
    assert "url(" not in page and "@import" not in page
    for told in (
        "mine for tiny<target>", "python -m train.distill run=mine", "20 steps in 2 minutes, fp32 on cpu",
        "python -m eval.alpha <1>", "python -m eval.decode <2>", "lr: 0.003  # <b>", "<script>alert('x')</script> & ␛",
        "tau/gsm8k/T1/static_2x1", "commit 0123456789ab",
    ):  # fmt: skip
        assert told in re.sub("[◦↵]", "", parsed.text), told
    assert not re.search(r"No (metrics|figures|generations|resolved)", parsed.text)


def links_in_order() -> list[str]:
    return [
        "figures", "learning-curves", "acceptance-by-depth-and-temperature", "failure-modes", "comparison",
        "generations", "config", "commands", "all-figures",
    ]  # fmt: skip


def test_what_is_slower_is_said():
    results = {"metrics": {key: {"value": m.value, "ci95": m.ci95, "n": m.n} for key, m in figures().items()}}
    told = [re.sub("<[^>]*>", "", sentence) for sentence in sentences(as_metrics(results))]
    assert told == [
        "T = 0: static_2x1 is the fastest, 1.60 [1.50, 1.70] times as fast as plain decoding, with 3.20 [1.60, 4.80] "
        "tokens a target forward (all, 4 prompts).",
        "T = 0, slower than plain decoding: chain_k4 on mt_bench (0.95 [0.85, 1.05]).",
        "T = 1: every method is slower than plain decoding; the least so is chain_k4, 0.90 [0.80, 1.00] times as fast, "
        "with 1.80 [0.90, 2.70] tokens a target forward (all, 4 prompts).",
    ]


def test_what_a_draft_vocabulary_leaves_out_is_said():
    share = {f"draft_vocab_share/{name}/T1/chain_k4": Metric(0.625, None, 4) for name in ("all", "gsm8k")}
    whole = {"draft_vocab_share/all/T0/chain_k4": Metric(1.0, None, 4)}
    told = (
        "T = 1: the draft vocabulary holds 62.5% of the plain texts' tokens (4 prompts); the others are never drafted."
    )
    assert vocabulary_lines(figures() | share | whole) == [told] and not vocabulary_lines(figures())
    assert html.unescape(sentences(figures() | share | whole)[-1]).count(told) == 1


def test_rows_stand_by_temperature_all_sets_first():
    metrics = figures()
    assert decoded(metrics)[:3] == [("T0", "all", "chain_k4"), ("T0", "all", "static_2x1"), ("T0", "gsm8k", "chain_k4")]
    one_set = {key: metric for key, metric in metrics.items() if "/gsm8k/T1/" in key}
    assert overall(metrics)["T1"] == {"chain_k4": "all", "static_2x1": "all"}
    assert overall(one_set) == {"T1": {"chain_k4": "gsm8k", "static_2x1": "gsm8k"}}


def page_of(metrics: dict[str, Metric]) -> str:
    header = {"versions": {}, "dtype": "float32", "device": "cpu", "git_sha": "unknown", "command": "c"}
    as_stored = {key: {"value": m.value, "ci95": m.ci95, "n": m.n} for key, m in metrics.items()}
    return html_report({**header, "metrics": as_stored}, title="x", plots={})


def test_slower_rows_and_the_greedy_check_are_marked():
    rows = re.findall(r'<tr class="([^"]*)">(.*?)</tr>', page_of(figures()))
    cells = {tuple(re.findall(r"<td[^>]*>(.*?)</td>", row)[:3]): classes for classes, row in rows}
    assert cells["0", "all", "chain_k4"] == "overall" and cells["1", "all", "chain_k4"] == "slower overall"
    assert cells["0", "mt_bench", "chain_k4"] == "slower" and cells["0", "mt_bench", "static_2x1"] == ""
    assert cells["chain_k4", "4", "1"] == ""
    wrong = page_of({**figures(), "greedy_failures/all/T0/chain_k4": Metric(2)})
    assert '<tr class="slower"><td class="text">chain_k4</td><td>4</td><td>1</td><td>0.125</td><td>2</td>' in wrong


def test_what_is_missing_is_said(tmp_path):
    folder = make_outputs(tmp_path, metrics={"alpha_expected/held_out/T1": Metric(0.4, (0.3, 0.5), 3)})
    (folder / "metrics.csv").unlink()
    (folder / "generations.html").unlink()
    [plot, path] = write_report(folder)
    assert plot.name == "by_temperature.png"
    text = Page(path.read_text()).text
    for told in (
        "No metrics.csv", "No failure_modes.json", "No outputs/compare", "No generations.html",
        "No resolved_config.yaml", "0.400 [0.300, 0.500]",
    ):  # fmt: skip
        assert told in text
    with pytest.raises(UserError, match=r"run eval\.alpha or eval\.decode"):
        write_report(tmp_path / "nothing")


def test_failure_modes_are_shown_with_their_sentences(tmp_path):
    folder = make_outputs(tmp_path)
    parts = [
        {"title": "by <batch>", "png": "failure_batch.png", "sentences": ["chain_k3 at batch 32: slower & why"]},
        {"title": "by kind", "png": "failure_kinds.png", "sentences": []},
    ]
    sides = {side: read_results(folder / "results.json")[side] for side in ("target", "draft")}
    (folder / "failure_modes.json").write_text(json.dumps({**sides, "parts": parts}))
    (folder / "failure_batch.png").write_bytes(b"\x89PNG drawn elsewhere")
    page = write_report(folder)[-1].read_text()
    section = page[page.index('<section id="failure-modes">') : page.index('<section id="comparison">')]
    parsed = Page(section)
    assert "by <batch>" in parsed.text and "chain_k3 at batch 32: slower & why" in parsed.text
    images = [attributes for tag, attributes in parsed.tags if tag == "img"]  # the second was never drawn
    assert [image["alt"] for image in images] == ["failure_batch"] and "by kind" in parsed.text
    assert images[0]["src"] == "data:image/png;base64," + base64.b64encode(b"\x89PNG drawn elsewhere").decode()
    # those of a draft that the run had before are not this one's
    (folder / "failure_modes.json").write_text(json.dumps({**sides, "draft": {"name": "mine"}, "parts": parts}))
    page = write_report(folder)[-1].read_text()
    assert "slower &amp; why" not in page and "No failure_modes.json of this target and draft" in page
    (folder / "failure_modes.json").write_text("{")
    with pytest.raises(UserError, match=r"failure_modes\.json: not a JSON file of ours"):
        write_report(folder)


def test_a_comparison_of_the_same_target_is_shown_fastest_first(tmp_path):
    folder = make_outputs(tmp_path)
    metrics = {
        "tau/T0/eagle3/chain_k3": Metric(2.0, (1.9, 2.1), 9),
        "speedup/T0/eagle3/chain_k3": Metric(0.9, (0.8, 1.0), 9),
        "speedup/T0/ngram_n3_k5": Metric(1.2, (1.1, 1.3), 9),
        "tokens_per_s/T0/plain": Metric(50.0, (49.0, 51.0), 9),
        "alpha/T1/eagle3/chain_k3": Metric(0.5, None, 9),
        "same_text/T1": Metric(1.0),
    }
    header = {**read_results(folder / "results.json"), "draft": {"runs": "mine"}}
    table = compare_table(
        {"metrics": {key: {"value": m.value, "ci95": m.ci95, "n": m.n} for key, m in metrics.items()}}
    )
    rows = re.findall(r'<tr class="([^"]*)">(.*?)</tr>', table)
    cells = [(classes, *re.findall(r"<td[^>]*>(.*?)</td>", row)) for classes, row in rows]
    assert cells == [
        ("", "0", "ngram_n3_k5", "-", "-", "-", "1.200 [1.100, 1.300]"),
        ("slower", "0", "eagle3/chain_k3", "2.000 [1.900, 2.100]", "-", "-", "0.900 [0.800, 1.000]"),
        ("", "0", "plain", "-", "-", "50.000 [49.000, 51.000]", "-"),
        ("", "1", "eagle3/chain_k3", "-", "0.5", "-", "-"),
    ]
    compare = tmp_path / "outputs" / "compare"
    merge_results(compare / "results.json", header, metrics)
    (compare / "compare.png").write_bytes(b"bars")
    page = write_report(folder)[-1].read_text()
    assert table in page and base64.b64encode(b"bars").decode() in page
    assert find_outputs(None, tmp_path / "outputs") == folder  # a comparison is no run, though it is newer
    merge_results(compare / "results.json", {**header, "target": {"name": "another"}}, metrics, overwrite=True)
    assert "No outputs/compare of this target" in write_report(folder)[-1].read_text()


def test_a_foreign_page_of_generations_is_refused():
    style, content = page_parts(generations())
    assert style.startswith(":root{") and content.startswith("<p>Each token") and content.endswith("</article>")
    with pytest.raises(UserError, match=r"generations\.html: no page"):
        page_parts("<html><body>mine</body></html>")


def test_values_without_an_interval_or_none_at_all():
    metrics = {
        "tau/s/T0/chain_k4": Metric(1.5, (None, None), 1),
        "speedup/s/T0/chain_k4": Metric(None, None, 0),
    }
    text = Page(page_of(metrics)).text
    assert "1.5" in text and "speedup/s/T0/chain_k4" in text and "T = 0:" not in text


def test_outputs_are_found_by_name_folder_or_age(tmp_path):
    folder, other = make_outputs(tmp_path), make_outputs(tmp_path, "other")
    root = tmp_path / "outputs"
    (root / "bench").mkdir()
    (root / "bench" / "results.json").write_text("{}")
    for given in ("mine", str(tmp_path / "checkpoints" / "mine"), str(folder)):
        assert find_outputs(given, root) == folder
    assert find_outputs(None, root) == other
    assert find_outputs(str(folder), tmp_path) == folder  # an output_root that does not hold it
    snapshot = tmp_path / "checkpoints" / "mine" / "snapshots" / "step-000020"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"run=.*step-000020: no .*mine-step-000020.*choose one of mine, other"):
        find_outputs(str(snapshot), root)
    folder.rename(root / "mine-step-000020")
    assert find_outputs(str(snapshot), root).name == "mine-step-000020"
    assert run_folder_of("mine-step-000020", tmp_path / "checkpoints").name == "mine"
    assert run_folder_of("theirs-for-tiny", tmp_path / "checkpoints") is None
    with pytest.raises(UserError, match=r"no results there; run eval\.decode"):
        find_outputs(None, tmp_path / "nothing")


def test_the_command(tmp_path, monkeypatch, capsys):
    folder = make_outputs(tmp_path)
    roots = [f"output_root={tmp_path / 'outputs'}", f"checkpoint_root={tmp_path / 'checkpoints'}"]
    monkeypatch.setattr(sys, "argv", ["report", *roots, "run=mine"])
    eval.html_report.main()
    assert str(folder / "report.html") in capsys.readouterr().out
    assert "python -m train.distill run=mine" in (folder / "report.html").read_text()
    monkeypatch.setattr(sys, "argv", ["report", *roots, "run=yours"])
    with pytest.raises(SystemExit) as caught:
        eval.html_report.main()
    assert caught.value.code == 2 and capsys.readouterr().err.startswith("error: run=yours: no ")


# --- W&B ------------------------------------------------------------------------------------------------------------


def test_tables_hold_every_figure_with_its_interval():
    columns, rows = decode_rows(figures())
    assert len(rows) == 12 and all(len(row) == len(columns) for row in rows)
    row = dict(zip(columns, rows[1]))
    assert (row["temperature"], row["set"], row["method"], row["prompts"]) == (0.0, "all", "static_2x1", 4)
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == (1.6, 1.5, pytest.approx(1.7))
    assert row["alpha"] is None and row["predicted_speedup_low"] is None
    columns, rows = alpha_rows(figures())
    assert rows[0] == ["held_out", 0.0, "all", 0.41, 0.4, 0.42, 9] and len(rows[0]) == len(columns)
    assert [row[2] for row in rows[:3]] == ["all", "0_64", "64_up"]


def test_scalars_for_comparing_runs():
    scalars = summary(figures())
    assert scalars["tau/all/T0/chain_k4"] == 3.0 and scalars["alpha_expected/held_out/T1.5"] == 0.41
    assert not [key for key in scalars if "depth" in key or "pos_" in key]
    assert fastest(figures()) == {
        "fastest_speedup/T0": 1.6, "fastest_tau/T0": 3.2, "fastest_speedup/T1": 0.9, "fastest_tau/T1": 1.8,
    }  # fmt: skip
    assert fastest({"tau/all/T0/chain_k4": Metric(2.0)}) == {}  # no plain runs


def wandb_records(data: bytes) -> bytes:
    """What a .wandb file (LevelDB's log format) holds without its headers, one of which may stand within a key."""
    content, at, block = b"", 7, 32_768
    while at + 7 <= len(data):
        if block - at % block < 7:  # no room for another header
            at += block - at % block
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        content += data[at + 7 : at + 7 + length]
        at += 7 + length
    return content


def test_wandb_gets_tables_plots_and_pages_into_the_runs_own_run(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, run_folder = make_outputs(tmp_path), tmp_path / "checkpoints" / "mine"
    write_report(folder, run_folder=run_folder)
    node = OmegaConf.create({"_target_": "train.loggers.wandb_logger", "_partial_": True, "project": "p", "tags": []})
    log_to_wandb({"csv": OmegaConf.create({})}, folder, run_folder=run_folder)
    assert not (folder / "wandb").exists()
    log_to_wandb({"wandb": node}, folder, run_folder=run_folder)
    assert wandb.run is None
    [run] = (folder / "wandb").glob("offline-run-*")
    assert run.name.endswith("-abcd1234")
    media = [path.relative_to(run / "files" / "media").as_posix() for path in run.glob("files/media/**/*.*")]
    stems = {re.sub(r"_\d+_[0-9a-f]+(\.table)?\.\w+$", "", name) for name in media}
    plots = {path.stem for path in folder.glob("*.png")}
    assert len(plots) == 5
    assert stems == {
        *(f"images/plots/{name}" for name in plots), "table/tables/decode", "table/tables/alpha_expected",
        "html/report", "html/generations",
    }  # fmt: skip
    [table] = run.glob("files/media/table/tables/decode_*.json")
    assert len(json.loads(table.read_text())["data"]) == 12
    content = b"".join(wandb_records(path.read_bytes()) for path in run.glob("*.wandb"))
    for key in (b"eval/fastest_speedup/T0", b"eval/tau/gsm8k/T1/static_2x1", b"0.003"):
        assert key in content
    assert read_results(folder / "results.json")["metrics"]  # and the CSV of the training is left alone
    assert (folder / "metrics.csv").read_text().startswith("step,train/loss")


def test_a_draft_that_was_not_trained_here_and_a_snapshot_have_runs_of_their_own(tmp_path):
    ids = []

    class Run:
        def __init__(self):
            self.summary, self.log = {}, lambda media: None

    def logger(*, run_id, **_):
        ids.append(run_id)
        return type("Logger", (), {"experiment": Run()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eval.wandb_media, "instantiate", lambda node: logger)
        folder = make_outputs(tmp_path)
        log_to_wandb({"wandb": None}, folder, run_folder=None)
        log_to_wandb({"wandb": None}, folder, run_folder=tmp_path / "checkpoints" / "mine")
        snapshot = folder.rename(folder.with_name("mine-step-000020"))
        log_to_wandb({"wandb": None}, snapshot, run_folder=tmp_path / "checkpoints" / "mine")
    assert ids == ["mine", "abcd1234", "mine-step-000020"]
