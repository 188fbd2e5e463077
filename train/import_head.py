"""Import a published head: `python -m train.import_head folder=FOLDER run=NAME target=hf target.source=TARGET`.

An EAGLE-3 or EAGLE-1 folder in the engines' layout, or an EAGLE-3 folder of the `speculators` library, becomes
checkpoints/NAME, which eval.alpha and eval.decode measure as any run of ours.
"""

import math
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from eval.entry import entry
from eval.results import run_info
from models.eagle import EagleHead, load_eagle
from models.errors import UserError
from models.import_head import read_head
from models.target import Target
from train.run_folder import RunFolder

OF_THE_RUN = (
    "run",
    "folder",
    "target",
    "data",
    "dtype",
)  # what the evaluations read of its config, and where it is from


def import_head(cfg: DictConfig) -> Path:
    """Write the head in `cfg.folder` as the run `cfg.run` (by default the folder's name); returns the run's folder.

    target.tap_ids=null takes the taps that the folder states. Raises UserError naming the key and the fix.
    """
    if cfg.folder is None:
        raise UserError("folder: not given; that of the head, for example folder=downloads/my_head run=my_head")
    run = RunFolder(cfg.checkpoint_root, cfg.run or Path(cfg.folder).resolve().name)
    target, head = load(cfg)
    with open_dict(cfg):
        cfg.run = run.name
        cfg.target.tap_ids = list(head.config.tap_ids) or None
    resolved = OmegaConf.to_container(cfg, resolve=True)
    config = {key: resolved[key] for key in OF_THE_RUN}
    if run.check(config, resume="auto", overwrite=cfg.overwrite).is_finished:
        print(f"run {run.name}: imported before from this folder; overwrite=true imports it again")
        return run.path
    try:
        run.begin(config, overwrite=cfg.overwrite)
        run.save_draft(head, target.tokenizer)
        load_eagle(run.path, target)
        run.finish({**run_info(), "metrics": {}, "target": {"name": target.name, **target.fingerprint()}})
    finally:
        run.release()
    print(describe(head))
    print(f"run {run.name}: {run.path}; measure it by\n  python -m eval.alpha run={run.path}")
    print(f"  python -m eval.decode run={run.path}", flush=True)
    return run.path


def load(cfg: DictConfig) -> tuple[Target, EagleHead]:
    """The target, tapped as the head in `cfg.folder` reads it, and that head."""
    tap_ids = cfg.target.tap_ids
    target: Target = instantiate(cfg.target, tap_ids=None)
    if tap_ids is not None and tap_ids != "default":
        tap_ids = list(tap_ids)
    head = read_head(cfg.folder, target, tap_ids=tap_ids)
    target.tap_ids = head.config.tap_ids or None
    return target, head


def describe(head: EagleHead) -> str:
    """What was understood, in one line."""
    c = head.config
    size = math.prod(head.embed_tokens.weight.shape)
    millions = (sum(p.numel() for p in head.parameters()) - size) / 1e6
    parts = [f"EAGLE-{c.version}, {millions:.1f}M parameters and the embedding"]
    if c.version == 3:
        flags = [
            name for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(c, name)
        ]
        parts += [f"taps {list(c.tap_ids)}", f"{c.draft_vocab_size} draft ids", *flags]
    parts += [f"RoPE base {c.rope_parameters['rope_theta']:g}", f"{c.max_position_embeddings} positions"]
    return f"head: {', '.join(parts)}"


@entry("import_head")
def main(cfg: DictConfig) -> None:
    import_head(cfg)


if __name__ == "__main__":
    main()
