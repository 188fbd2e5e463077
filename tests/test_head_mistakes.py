"""A user's mistakes with EAGLE heads: one line that names key, value and fix, before anything is trained."""

import json
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from data.rows import Rows
from data.signals import SignalSpec
from eval.entry import CONF_DIR
from models.drafts import load_draft
from models.eagle import build_eagle, load_eagle
from models.errors import UserError
from models.target import Target, load_target
from train.cache import caches
from train.distill import build_head, check_head

SMOKE = ["+experiment=smoke", "~draft.n_positions", "draft.draft_vocab_size=100"]


def composed(*overrides: str):
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose(config_name="distill", overrides=list(overrides))


def same_rows(*ids: int, num_rows: int = 2) -> Rows:
    offsets = np.arange(num_rows + 1, dtype=np.int64) * len(ids)
    return Rows(np.tile(ids, num_rows), np.ones(num_rows * len(ids), dtype=bool), offsets, np.arange(num_rows))


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    build_eagle(target=target, draft_vocab_size=10).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+experiment=smoke", "draft=eagle3"], r"draft\.n_positions: a head has no such key; leave it out by '~draft"),
        ([*SMOKE, "draft=eagle3", "draft.simulation=null"], r"draft\.simulation=null: draft=eagle3 is trained by it"),
        ([*SMOKE, "draft=eagle1", "draft.simulation={steps: 3, decay: 0.8}"], r"set draft\.simulation=null"),
        ([*SMOKE, "draft=eagle1", "draft.train_lm_head=true"], r"draft\.train_lm_head=true: .* set it to false"),
        ([*SMOKE, "draft=eagle3", "target.tap_ids=null"], r"set target\.tap_ids=default"),
        ([*SMOKE, "draft=eagle3", "cache.signal=topk"], r"cache\.signal=topk"),
    ],
)
def test_wrong_keys_are_told_before_anything_is_loaded(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_head(composed(*overrides))


def test_right_keys_pass() -> None:
    check_head(composed(*SMOKE, "draft=eagle3"))
    check_head(composed(*SMOKE, "draft=eagle1"))
    check_head(composed("+experiment=smoke"))


def test_rows_without_anything_to_draft_are_told(target: Target) -> None:
    """Slot p drafts x[p+2]: a row of two tokens has none."""
    cfg = composed(*SMOKE, "draft=eagle3")
    rows = {"train": same_rows(5, 6, 7), "held_out": same_rows(5, 6)}
    with pytest.raises(UserError, match=r"data\.max_length=128: no held_out row has two supervised tokens side"):
        build_head(cfg, target, rows)
    build_head(cfg, target, {**rows, "held_out": same_rows(5, 6, 7)})


def test_coverage_is_that_of_the_head_which_training_goes_on_with(target: Target, tmp_path: Path) -> None:
    cfg = composed(*SMOKE[:2], "draft=eagle3", "draft.draft_vocab_size=3", f"draft.init={tmp_path}")
    rows = dict.fromkeys(("train", "held_out"), same_rows(50, 60, 70))
    build_eagle(target=target, draft_vocab_size=3).save_pretrained(tmp_path)  # ids 0, 1, 2
    head, covered = build_head(cfg, target, rows)
    assert head.draft_vocab.tolist() == [0, 1, 2] and set(covered.values()) == {0.0}


def test_rows_beyond_the_targets_positions_are_told_online_too(target: Target) -> None:
    cfg = composed(*SMOKE, "draft=eagle3", "cache.mode=none")
    rows = {"train": same_rows(*[5] * (target.max_positions + 1))}
    with pytest.raises(UserError, match=rf"set data\.max_length={target.max_positions} or less"):
        caches(cfg, target, SignalSpec("hidden"), rows)


def test_a_head_is_not_loaded_as_a_language_model(folder: Path) -> None:
    """Its config.json says llama, and transformers would make up the weights that it misses."""
    with pytest.raises(UserError, match=r"an EAGLE head and no language model; .*draft\.init="):
        load_draft(folder)


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not None}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000]),
        lambda folder: edit(folder, hidden_size=None),
        lambda folder: edit(folder, hidden_size="wide"),
    ],
)
def test_a_damaged_folder_is_told_in_one_line(target: Target, folder: Path, damage) -> None:
    damage(folder)
    with pytest.raises(UserError, match=r"^draft .*: cannot be read as a head \(.+\); save it again$"):
        load_eagle(folder, target)


def test_init_names_what_differs(target: Target, folder: Path) -> None:
    with pytest.raises(UserError, match="its draft_vocab_size is 10 and this draft's 11"):
        build_eagle(target=target, draft_vocab_size=11, init=str(folder))


def test_heads_of_an_odd_width_are_told() -> None:
    gpt2 = load_target("random:tiny_gpt2", dtype="fp32", device="cpu", tap_ids=[0, 1, 3])
    with pytest.raises(UserError, match=r"draft\.num_attention_heads=3: leaves heads of \d+ channels"):
        build_eagle(target=gpt2, draft_vocab_size=10, num_attention_heads=3)
