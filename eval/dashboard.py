"""A W&B workspace for the runs of a project: python -m eval.dashboard (make dashboard). docs/dashboard.md lists it.

SECTIONS says what is shown; `workspace` makes of it what W&B's own library (wandb-workspaces) saves.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from eval.entry import entry
from models.errors import UserError

NAME = "Draftsmith"
TEMPERATURES = ("T0", "T0.7", "T1", "T1.5")


@dataclass(frozen=True)
class Panel:
    """kind: line (over tokens seen), bar (one for each run), table or media. keys: the logged names that it shows."""

    title: str
    kind: str
    keys: tuple[str, ...]


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Result": (
        Panel("speed-up of the fastest method", "bar", ("eval/fastest_speedup/T0", "eval/fastest_speedup/T1")),
        Panel("its tokens a target forward", "bar", ("eval/fastest_tau/T0", "eval/fastest_tau/T1")),
        Panel(
            "expected acceptance on held-out text", "bar",
            tuple(f"eval/alpha_expected/held_out/{temperature}" for temperature in TEMPERATURES),
        ),
        Panel("the decode loop: all sets and methods", "table", ("tables/decode",)),
        Panel("expected acceptance by temperature and position", "table", ("tables/alpha_expected",)),
    ),
    "Training": (
        Panel("loss", "line", ("train/loss", "val/loss")),
        Panel("acceptance at T = 1", "line", ("train/alpha", "val/alpha")),
        Panel("KL [nats a token]", "line", ("train/kl", "val/kl")),
        Panel("learning rate", "line", ("train/lr",)),
        Panel("gradient norm", "line", ("train/grad_norm",)),
        Panel("tokens a second", "line", ("train/tokens_per_s",)),
    ),
    "Plots": (
        Panel("acceptance by depth, methods compared", "media", ("plots/acceptance_by_depth",)),
        Panel("by temperature", "media", ("plots/by_temperature",)),
        Panel("acceptance by depth and set", "media", ("plots/alpha_by_depth",)),
        Panel("learning curves", "media", ("plots/loss", "plots/val_alpha")),
    ),
    "Reading": (
        Panel("report", "media", ("report",)),
        Panel("coloured generations", "media", ("generations",)),
    ),
}  # fmt: skip
X = "train/tokens"


def workspace(entity: str, project: str) -> Any:
    """SECTIONS as a `wandb_workspaces.workspaces.Workspace`, not saved yet."""
    reports, workspaces = _library()

    def drawn(panel: Panel) -> Any:
        if panel.kind == "line":
            return reports.LinePlot(title=panel.title, x=X, y=list(panel.keys), title_x="tokens seen")
        if panel.kind == "bar":
            return reports.BarPlot(title=panel.title, metrics=list(panel.keys))
        if panel.kind == "table":
            [name] = panel.keys
            return reports.WeavePanelSummaryTable(table_name=name)
        assert panel.kind == "media", panel.kind
        return reports.MediaBrowser(title=panel.title, media_keys=list(panel.keys))

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            workspaces.Section(name=name, is_open=True, panels=[drawn(panel) for panel in panels])
            for name, panels in SECTIONS.items()
        ],
    )


def _library() -> tuple[Any, Any]:
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise UserError(
            "dashboard: the package wandb-workspaces is missing; run `make setup`, or python -m pip install "
            "wandb-workspaces"
        ) from None
    return reports, workspaces


def create(*, entity: str | None, project: str) -> str:
    """Save the workspace as a new view; returns its address. Raises UserError without a key, or when W&B refuses."""
    _library()
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise UserError(
            "dashboard: no W&B key; set WANDB_API_KEY or run `wandb login`, then make dashboard again (the panels are "
            "listed in docs/dashboard.md)"
        )
    try:
        entity = entity or wandb.Api().default_entity
        if not entity:
            raise UserError("logger.wandb.entity: W&B knows no default one; give logger.wandb.entity=YOUR_TEAM_OR_USER")
        return workspace(entity, project).save().url
    except (wandb.errors.Error, OSError) as error:  # refused key, no such project, no network
        told = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"dashboard: W&B refused {entity or 'the key'}/{project} ({told})") from None


@entry("dashboard")
def main(cfg: DictConfig) -> None:
    if "wandb" not in cfg.logger:
        raise UserError("logger: the dashboard is W&B's; leave logger=wandb as it is")
    print(create(entity=cfg.logger.wandb.entity, project=cfg.logger.wandb.project))


if __name__ == "__main__":
    main()
