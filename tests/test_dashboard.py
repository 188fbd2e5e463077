"""The W&B workspace: its panels show what is really logged, the page of docs lists them, without a key one line."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import wandb
from hydra import compose, initialize_config_dir

import eval.alpha
import eval.dashboard
import eval.decode
import eval.plots
from eval.dashboard import SECTIONS, TEMPERATURES, X, create, workspace
from eval.entry import CONF_DIR
from eval.plots import read_metrics_csv
from eval.report import as_metrics
from eval.results import read_results
from eval.wandb_media import log_media
from models.errors import UserError
from train.quickstart import quickstart

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # of the library itself
KEYS = [key for panels in SECTIONS.values() for panel in panels for key in panel.keys]


class Run:
    """Stands for a W&B run."""

    def __init__(self):
        self.logged, self.summary = {}, {}

    def log(self, media):
        self.logged |= media


def test_every_panel_shows_something_that_a_run_logs(tmp_path, monkeypatch):
    """The whole job on a tiny target: what it logged while training, and what is logged of its figures; then by the two
    evaluations of their own."""
    monkeypatch.setattr(eval.plots, "DPI", 30)
    small = [
        "data.max_train_tokens=4000", "data.max_held_out_tokens=1000", "alpha.max_tokens=200", "trainer.max_epochs=1",
        "decode.sets=[gsm8k]", "decode.num_prompts=1", "decode.max_new_tokens=8", "run=tiny",
    ]  # fmt: skip
    roots = [f"{name}_root={tmp_path / name}" for name in ("output", "checkpoint", "cache")]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("distill", overrides=["+experiment=smoke", *small, *roots])
    quickstart(cfg)
    folder = tmp_path / "output" / "tiny"
    run = Run()
    log_media(run, folder, read_results(folder / "results.json"))
    logged = {*run.logged, *run.summary, *read_metrics_csv(folder / "metrics.csv")}
    assert not {*KEYS, X} - logged
    assert {f"T{t:g}" for t in cfg.alpha.temperatures} == set(TEMPERATURES)
    assert isinstance(run.logged["report"], wandb.Html) and isinstance(run.logged["plots/loss"], wandb.Image)
    assert {f"eval/{key}" for key in as_metrics(read_results(folder / "results.json")) if key.startswith("tau/")} <= {
        *run.summary
    }

    monkeypatch.setenv("WANDB_MODE", "offline")
    for main, sent in ((eval.alpha.main, "tables/alpha_expected"), (eval.decode.main, "tables/decode")):
        monkeypatch.setattr(sys, "argv", ["x", "run=tiny", "logger=wandb", *small[2:3], *small[4:7], *roots])
        (folder / "report.html").unlink()
        main()
        assert (folder / "report.html").is_file() and wandb.run is None
        [offline] = (folder / "wandb").glob("offline-run-*")
        assert list(offline.glob(f"files/media/table/{sent}_*.json"))
        assert list(offline.glob("files/media/html/report_*.html"))
        shutil.rmtree(folder / "wandb")


def test_the_document_lists_the_panels():
    document = (Path(CONF_DIR).parent / "docs" / "dashboard.md").read_text()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in document.splitlines() if line[:1] == "|"]
    for section, panels in SECTIONS.items():
        for panel in panels:
            assert [section, panel.title, panel.kind, ", ".join(f"`{key}`" for key in panel.keys)] in table
    for command in re.findall(r"^python -m (.*)$", document, flags=re.M):
        module, *overrides = command.split()
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            cfg = compose(module.rsplit(".", 1)[1], overrides=overrides)
        assert "wandb" in cfg.logger


def test_the_librarys_model_of_the_workspace():
    model = workspace("me", "drafts")._to_model()  # what `save` sends
    sections = {section.name: section for section in model.spec.section.panel_bank_config.sections}
    assert [name for name in sections if name in SECTIONS] == list(SECTIONS)
    for name, panels in SECTIONS.items():
        assert sections[name].is_open
        sent = [str(panel) for panel in sections[name].panels]
        assert len(sent) == len(panels)
        for panel, text in zip(panels, sent):
            assert all(key in text for key in panel.keys) and (panel.kind != "line" or X in text)
    assert (model.entity, model.project, model.display_name) == ("me", "drafts", "Draftsmith")


def test_without_a_key_there_is_one_line(monkeypatch, capsys, tmp_path):
    asked = []
    monkeypatch.setattr(wandb, "login", lambda **told: asked.append(told))
    monkeypatch.setattr(sys, "argv", ["dashboard", f"output_root={tmp_path}"])
    with pytest.raises(SystemExit) as caught:
        eval.dashboard.main()
    assert caught.value.code == 2 and asked == [{"prompt": False, "verify": False}]
    error = capsys.readouterr().err
    assert error.startswith("error: dashboard: no W&B key; set WANDB_API_KEY") and error.count("\n") == 1


def test_with_a_key_it_is_saved_for_the_default_entity(monkeypatch):
    saved = []

    class Saved:
        url = "https://wandb.ai/me/drafts?nw=x"

    monkeypatch.setattr(wandb, "login", lambda **told: True)
    monkeypatch.setattr(wandb, "Api", lambda: type("Api", (), {"default_entity": "me"}))
    monkeypatch.setattr("wandb_workspaces.workspaces.Workspace.save", lambda self: saved.append(self) or Saved)
    assert create(entity=None, project="drafts") == Saved.url
    assert create(entity="team", project="drafts") == Saved.url
    assert [(each.entity, each.project, len(each.sections)) for each in saved] == [
        ("me", "drafts", 4), ("team", "drafts", 4),
    ]  # fmt: skip


def test_a_refusal_is_one_line(monkeypatch):
    def refuse(self):
        raise wandb.errors.CommError("project not found\nmore")

    monkeypatch.setattr(wandb, "login", lambda **told: True)
    monkeypatch.setattr("wandb_workspaces.workspaces.Workspace.save", refuse)
    with pytest.raises(UserError, match=r"W&B refused team/drafts \(project not found\)"):
        create(entity="team", project="drafts")


def test_without_the_library_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(UserError, match="wandb-workspaces is missing"):
        create(entity="me", project="drafts")
