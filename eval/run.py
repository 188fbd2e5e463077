"""What an evaluation judges: a finished run found again with its own config, or any pair of models.

`checkpoints/<run>/` holds the draft in transformers layout, `resolved_config.yaml` and `run.json`; with
`trainer.snapshot_every_steps` also `snapshots/step-000500/`, the draft of then: judged like a run of its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
import yaml
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from eval.results import make_header
from models.drafts import load_draft
from models.eagle import EagleHead, is_eagle_folder, load_eagle
from models.errors import UserError
from models.hub import hub_reachable
from models.medusa import MedusaHeads, is_medusa_folder, load_medusa
from models.packed_linear import pack_linears
from models.target import Target, plain_vocabulary

# What the draft was trained on: taken from the run, not from the defaults.
OF_THE_RUN = ("target", "data", "dtype")


@dataclass(frozen=True)
class Run:
    """A run on disk, or one of its snapshots. `info` is its run.json (command, git_sha, metrics, target fingerprint,
    versions); empty for a snapshot."""

    folder: Path  # where the draft is
    config: DictConfig
    info: dict[str, Any]

    @property
    def name(self) -> str:
        """mine; mine-step-000500 for a snapshot, so that its results have a folder of their own."""
        run = run_of_snapshot(self.folder)
        return self.folder.name if run is None else f"{run.resolve().name}-{self.folder.name}"

    @property
    def owner(self) -> Path:
        """The run's own folder, of a snapshot too."""
        return run_of_snapshot(self.folder) or self.folder


@dataclass(frozen=True)
class Pair:
    """A target and a draft, loaded, on one device and in one dtype. `name` is that of the folder of results.

    draft: None with draft=none, for methods that need none.
    """

    target: Target
    draft: PreTrainedModel | EagleHead | MedusaHeads | None
    name: str
    draft_name: str
    config: DictConfig
    run: Run | None

    @property
    def target_fingerprint(self) -> dict[str, str]:
        return {"name": self.target.name, **self.target.fingerprint()}

    def header(self, **data: str) -> dict[str, Any]:
        """Of a results file about this pair. data: fingerprints of what it was measured on."""
        return make_header(
            device=self.target.device,
            dtype=self.target.dtype,
            target=self.target_fingerprint,
            draft=self.draft_fingerprint,
            data=data,
        )

    @property
    def draft_fingerprint(self) -> dict[str, str]:
        return {"name": self.draft_name, **({} if self.draft is None else draft_fingerprint(self.draft))}


def load_pair(cfg: DictConfig, overrides: Sequence[str]) -> Pair:
    """The pair that an evaluation is asked for.

    With `draft=...` or `draft.id=...` on the command line: `cfg.target` and that off-the-shelf draft; with `draft=none`
    the target alone. Otherwise a run (`cfg.run`, by default the newest), its own target and data unless the command
    line sets them. An experiment whose draft is off the shelf is judged as it is until its run is there.
    The draft runs in the target's dtype, as it does when decoding. Raises UserError (no run, other vocabulary, ...).
    """
    keys = {_override_key(override).split(".")[0] for override in overrides}
    if is_without_draft(cfg, overrides):
        target = instantiate(cfg.target)
        print("draft: none")
        name = cfg.run if "run" in keys else f"none-for-{Path(target.name).name}"
        return Pair(target, None, name, "no draft", cfg, None)
    is_untrained = is_off_the_shelf(cfg) and "run" not in keys
    if "draft" in keys or is_untrained:
        if not cfg.draft.get("id"):
            raise UserError(
                "draft.id: not given; write draft=hf draft.id=NAME_OR_FOLDER, or run=NAME for a trained one"
            )
        run, config, source, draft_name = None, cfg, cfg.draft.id, str(cfg.draft.id)
        print(f"draft: {draft_name} as it is")
    else:
        run = load_run(find_run(cfg.run, cfg.checkpoint_root))
        config = run_config(cfg, run.folder, overrides)
        source, draft_name = run.folder, run.name
        print(f"run: {run.folder}")
    target: Target = instantiate(config.target)
    draft = load_for(target, source)
    if not isinstance(draft, EagleHead | MedusaHeads):
        check_vocabulary(target, draft, source)
    name = f"{Path(draft_name).name}-for-{Path(target.name).name}"
    if not is_untrained:  # the experiment's name is for the run that may follow
        name = cfg.run or name
    return Pair(target, draft, run.name if run else name, draft_name, config, run)


def is_without_draft(cfg: DictConfig, overrides: Sequence[str]) -> bool:
    """Whether an evaluation is asked to do without a draft; a run that the command line names has its own."""
    keys = {_override_key(override).split(".")[0] for override in overrides}
    return cfg.draft.kind == "none" and ("draft" in keys or "run" not in keys)


def needs_draft(cfg: DictConfig, overrides: Sequence[str], what: str) -> None:
    """Raises UserError where there is none, before anything is loaded."""
    if is_without_draft(cfg, overrides):
        raise UserError(
            f"draft=none: {what} needs a draft; give run=NAME for a trained one, or draft=hf draft.id=NAME_OR_FOLDER"
        )


def is_off_the_shelf(cfg: DictConfig) -> bool:
    """Whether an experiment begins with a draft that is there already, and its run has not begun."""
    return cfg.draft.kind == "hf" and bool(cfg.run) and not (Path(cfg.checkpoint_root) / cfg.run).is_dir()


def load_for(target: Target, source: str | Path) -> PreTrainedModel | EagleHead | MedusaHeads:
    """The draft model or head at `source`, on the target's device and in its dtype, as it decodes."""
    draft = read_draft(target, source)
    return pack_linears(cast_weights(draft, target.dtype).to(target.device).eval())


def read_draft(target: Target, source: str | Path) -> PreTrainedModel | EagleHead | MedusaHeads:
    """The draft model or head at `source`, on the CPU, as saved."""
    if is_eagle_folder(source):
        return load_eagle(source, target)
    return load_medusa(source, target) if is_medusa_folder(source) else load_draft(source)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its weights in `dtype`, in place, as `from_pretrained(dtype=...)` would have loaded it.

    Unlike `.to(dtype)` this leaves buffers alone, and so the rotary frequencies in fp32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def check_vocabulary(target: Target, draft: PreTrainedModel, source: str | Path) -> None:
    """Raises UserError unless an id means the same token to both models (added special tokens aside)."""
    offline = not (Path(source).is_dir() or hub_reachable())
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=offline)
    except Exception as error:  # besides OSError and ValueError the tokenizers library raises plain ones
        if (Path(source) / "tokenizer.json").is_file():
            told = str(error).strip().splitlines()[0][:200]
            raise UserError(f"draft {source}: its tokenizer.json cannot be read ({told}); write it again") from None
        tokenizer = None
    theirs = {} if tokenizer is None else plain_vocabulary(tokenizer)
    if not theirs:  # weights without a tokenizer: only the sizes can be compared
        width = draft.get_input_embeddings().weight.shape[0]
        if width < target.vocab_size:
            raise UserError(
                f"draft {source}: a vocabulary of {width} ids and no tokenizer, the target has {target.vocab_size}; "
                "give a draft with the target's tokenizer"
            )
        return
    ours = plain_vocabulary(target.tokenizer)
    differing = sum(ours[i] != theirs[i] for i in ours.keys() & theirs.keys())
    if differing or not ours.keys() & theirs.keys():
        raise UserError(
            f"draft {source}: its vocabulary ({len(theirs)} ids) differs from the target's ({len(ours)} ids), "
            f"{differing} ids are other tokens; a draft needs the target's tokenizer"
        )


def draft_fingerprint(draft: nn.Module) -> dict[str, str]:
    """Hash of the weights as loaded."""
    digest = xxhash.xxh3_64()
    for name, tensor in sorted(draft.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return {"draft_weights": digest.hexdigest()}


def find_run(run: str | Path | None, checkpoint_root: str | Path) -> Path:
    """Folder of `run`: a name under `checkpoint_root`, a path, or None for the newest finished run.

    Finished means that it has a run.json; a snapshot of a run that still trains will do. Raises UserError when there is
    none, naming those there are.
    """
    root = Path(checkpoint_root)
    finished = {path.parent.name: path for path in root.glob("*/run.json")}
    if run is None:
        if not finished:
            raise UserError(
                f"checkpoint_root={root}: no finished run there; train one first "
                "(python -m train.distill +experiment=quickstart), or give draft=hf draft.id=NAME_OR_FOLDER"
            )
        return max(finished.values(), key=lambda path: path.stat().st_mtime).parent
    for folder in (root / run, Path(run)):
        if (folder / "run.json").is_file() or (run_of_snapshot(folder) and (folder / "config.json").is_file()):
            return folder
    for folder in (root / run, Path(run)):
        is_inside = (folder.parent / "resolved_config.yaml").is_file()
        owner = run_of_snapshot(folder) or (folder.parent if is_inside else folder)
        snapshots = sorted(owner.glob("snapshots/*/config.json"))
        hint = f"; or judge a snapshot, the last is run={snapshots[-1].parent}" if snapshots else ""
        if run_of_snapshot(folder):
            raise UserError(f"run={run}: no such snapshot{hint}")
        if folder.is_dir() and is_inside:
            raise UserError(f"run={run}: a folder inside a run; give run={owner}{hint}")
        if folder.is_dir():
            raise UserError(
                f"run={run}: no run.json there, its training has not finished; run train.distill again{hint}"
            )
    raise UserError(f"run={run}: no such run; there are: {', '.join(sorted(finished)) or 'none'} (in {root})")


def run_of_snapshot(folder: Path) -> Path | None:
    """The run that `folder` is a snapshot of; None where it is none."""
    run = folder.parent.parent
    return run if folder.parent.name == "snapshots" and (run / "resolved_config.yaml").is_file() else None


def load_run(folder: str | Path) -> Run:
    """Read a run's config and run.json (of a snapshot: its run's config). Raises UserError when one is broken."""
    folder = Path(folder)
    if run := run_of_snapshot(folder):
        return Run(folder, read_config(run), {})
    config = read_config(folder)
    try:
        info = json.loads((folder / "run.json").read_text())
        if not isinstance(info, dict):
            raise ValueError("run.json holds no mapping")
    except (OSError, ValueError) as error:
        raise UserError(f"run={folder}: cannot read it ({error}); train it again with overwrite=true") from None
    return Run(folder, config, info)


def read_config(folder: Path) -> DictConfig:
    """The `resolved_config.yaml` of a run's folder. Raises UserError when it is missing or broken."""
    try:
        config = OmegaConf.load(folder / "resolved_config.yaml")
        if not isinstance(config, DictConfig) or not config:
            raise ValueError("it holds no mapping")
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        told = str(error).strip().splitlines()[0]
        raise UserError(
            f"run={folder}: cannot read its resolved_config.yaml ({told}); train it again with overwrite=true"
        ) from None
    return config


def run_config(cfg: DictConfig, run_dir: str | Path, overrides: Sequence[str]) -> DictConfig:
    """`cfg` with the run's own target, data and dtype, except what `overrides` (the command line) set.

    overrides: as `HydraConfig.get().overrides.task` lists them: ["data.max_length=256", "target=gpt2"].
    Everything else (device, alpha, decode, folders) stays as composed. `run` becomes the run's name.
    """
    run = load_run(run_dir)
    merged = cfg.copy()
    with open_dict(merged):
        for key in OF_THE_RUN:
            if key in run.config and key in cfg:
                OmegaConf.update(merged, key, run.config[key], merge=False)
        for key, value in OmegaConf.to_container(cfg.target, resolve=False).items():
            if isinstance(value, str) and value.startswith("${"):
                merged.target[key] = value  # device, dtype, folders: those of this machine and this call
        for key in map(_override_key, overrides):
            if key.split(".")[0] not in OF_THE_RUN:
                continue
            if _has(cfg, key):
                OmegaConf.update(merged, key, OmegaConf.select(cfg, key), merge=False)
        merged.run = run.name
    return merged


def _override_key(override: str) -> str:
    """The config key that a command-line override sets: `+data.seed=3` sets `data.seed`."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0].replace("/", ".")


def _has(cfg: DictConfig, key: str) -> bool:
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return isinstance(node, DictConfig) and leaf in node
