"""Where speculation fails: python -m eval.failure_modes [run=NAME] -> failure_modes.json and a plot for each part

    temperature  methods over temperatures: flat distributions are hard to guess
    draft_len    chains over K: later tokens are rarely accepted, and each costs a draft step
    batch        a chain over batch sizes: the more rows, the less room a target forward leaves for drafted tokens
    kinds        methods over code, maths, chat and prose: what the draft was trained on, and how predictable it is

1. each part decodes its prompts plainly and by its methods, in turn (eval.decode; batches: eval.batched)
2. its figures with 95 % intervals, sentences and plot are written as soon as it is done
3. where speculation is slower a sentence says by how much, and why: the tokens of a round against its cost
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

from eval.drafters import check_attention, check_ragged, check_shape, masked_models
from eval.entry import entry
from eval.failure_parts import PARTS, Settings, fitting_lengths, fitting_methods
from eval.failure_view import plot_part, print_part, sentences
from eval.html_report import write_report
from eval.loop import check_vocabulary
from eval.prompts import load_prompts, prompts_fingerprint
from eval.results import write_atomic
from eval.run import Pair, load_pair
from eval.tree import TreeShape
from eval.wandb_media import log_to_wandb
from models.errors import UserError
from models.tiny import byte_tokenizer

KEYS_OF = {  # what a part's figures depend on
    "temperature": ("methods", "temperatures", "sets", "num_prompts", "max_new_tokens", "seed"),
    "draft_len": ("draft_lens", "sets", "num_prompts", "max_new_tokens", "seed"),
    "batch": ("methods", "batch_sizes", "num_batches", "sets", "max_new_tokens", "seed"),
    "kinds": ("methods", "kind_prompts", "prose_tokens", "max_new_tokens", "seed"),
}
TITLES = {
    "temperature": "By temperature",
    "draft_len": "By draft length, greedy",
    "batch": "By batch size, greedy",
    "kinds": "By kind of text, greedy",
}
PNGS = {part: f"failure_{part}.png" for part in TITLES}


def run_failure_modes(
    pair: Pair, settings: Settings, *, output_root: str | Path, overwrite: bool = False
) -> list[dict[str, Any]]:
    """Measure the parts that are not there yet, write each, and return all: `name`, `title`, `png`, `sentences`,
    `settings`, `metrics`, and the command, commit, device and dtype they were made by.

    Raises UserError for a pair without a draft, and where the file holds another pair's parts.
    """
    if pair.draft is None:
        raise UserError("draft=none: failure modes are those of a draft; give run=NAME or draft=hf draft.id=NAME")
    if isinstance(pair.draft, PreTrainedModel):
        check_vocabulary(pair.target, pair.draft)
    # before anything is measured
    models = masked_models(pair.target, pair.draft)
    shapes = [TreeShape.parse(name) for name in fitting_methods(settings["methods"], pair.draft)]
    check_attention(models, shapes, key="failure.methods")
    if "batch" in settings["parts"]:
        check_ragged(models, setting=f"failure.parts={list(settings['parts'])}")
    for shape in shapes:
        if shape.needs_draft:
            check_shape(pair.draft, shape, vocab_size=pair.target.vocab_size, key="failure.methods")
    if "draft_len" in settings["parts"]:
        fitting_lengths(settings["draft_lens"], pair.draft)
    folder = Path(output_root) / pair.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "failure_modes.json"
    prompts = load_prompts(settings["sets"], pair.target.tokenizer, num_prompts=settings["num_prompts"])
    header = pair.header(prompts=prompts_fingerprint(prompts))
    held = {part["name"]: part for part in read_parts(path, header, overwrite=overwrite)}
    title = f"{pair.draft_name} for {pair.target.name}"
    for name in settings["parts"]:
        of_part = {key: settings[key] for key in KEYS_OF[name]}
        if name in held and held[name]["settings"] == of_part and not overwrite:
            print(f"failure modes, {name}: measured before; overwrite=true measures it again")
            print_part(held[name])
            continue
        figures = PARTS[name](pair.target, pair.draft, settings)
        held[name] = {
            "name": name,
            "title": TITLES[name],
            "png": PNGS[name],
            "sentences": sentences(figures, name),
            "settings": of_part,
            "made_by": {key: header[key] for key in ("command", "git_sha", "device", "dtype")},
            "metrics": {
                key: {"value": m.value, "ci95": m.ci95 and list(m.ci95), "n": m.n} for key, m in figures.items()
            },
        }
        plot_part(held[name], folder / PNGS[name], title=title)
        parts = [held[part] for part in TITLES if part in held]
        write_atomic(path, json.dumps({**header, "parts": parts}, indent=1) + "\n")
        print_part(held[name])
    return [held[part] for part in TITLES if part in held]


def read_parts(path: Path, header: Mapping[str, Any], *, overwrite: bool) -> list[dict[str, Any]]:
    """Parts of an earlier call for the same pair. Raises UserError where they are of another, unless overwritten."""
    if not path.is_file():
        return []
    try:
        held = json.loads(path.read_text())
        parts, sides = held["parts"], {side: held[side] for side in ("target", "draft")}
    except (ValueError, KeyError, TypeError):
        if overwrite:
            return []
        raise UserError(f"{path} is no file of failure modes: move it away, or overwrite=true to replace it") from None
    other = [side for side in sides if sides[side] != header[side]]
    if other and not overwrite:
        raise UserError(
            f"{path} holds the failure modes of another {other[0]}: choose another output_root, or overwrite=true to "
            "replace the file"
        )
    return [] if other else parts


def check_failure(settings: Settings) -> None:
    """Raises UserError, naming the key, before anything is loaded."""
    for name in settings["parts"]:
        if name not in PARTS:
            raise UserError(f"failure.parts={name}: unknown part; use {', '.join(PARTS)}")
    shapes = [TreeShape.parse(name, key="failure.methods") for name in settings["methods"]]
    load_prompts(settings["sets"], byte_tokenizer(), num_prompts=1, group="failure")
    if "batch" in settings["parts"] and not any(shape.kind == "chain" for shape in shapes):
        raise UserError(f"failure.methods={list(settings['methods'])}: batches need a chain; add for example chain_k3")


@entry("failure_modes")
def main(cfg: DictConfig) -> None:
    settings = OmegaConf.to_container(cfg.failure, resolve=True)
    check_failure(settings)
    pair = load_pair(cfg, HydraConfig.get().overrides.task)
    parts = run_failure_modes(pair, settings, output_root=cfg.output_root, overwrite=cfg.overwrite)
    folder, run_folder = Path(cfg.output_root) / pair.name, pair.run and pair.run.owner
    written = [folder / "failure_modes.json", *(folder / part["png"] for part in parts)]
    if (folder / "results.json").is_file():
        written += [path for path in write_report(folder, run_folder=run_folder) if path.suffix == ".html"]
        log_to_wandb(cfg.logger, folder, run_folder=run_folder)
    for path in written:
        print(path)


if __name__ == "__main__":
    main()
