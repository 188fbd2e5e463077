"""A user's mistakes with EAGLE heads: one line that names key, value and fix, before anything is trained."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_helpers import make_rows
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from transformers import LlamaConfig, LlamaForCausalLM

import train.distill
from data.rows import Rows
from data.signals import SignalSpec
from eval.entry import CONF_DIR, check_config
from models.drafts import load_draft
from models.eagle import build_eagle, load_eagle
from models.errors import UserError
from models.target import Target, load_target
from models.tiny import byte_tokenizer
from train.cache import caches
from train.distill import build_head, check_head, some_taps

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
        (
            ["+experiment=smoke", "draft=eagle3"],
            r"draft\.n_positions=1024: a head has no such key; leave it out by '~draft",
        ),
        (
            ["+experiment=quickstart", "draft=gpt2_30m"],
            r"^draft\.simulation={'steps': 3}: draft\.kind=gpt2 has no such key; leave it out by '~draft\.simulation'$",
        ),
        (
            ["+experiment=quickstart", "draft=eagle1"],
            r"^draft\.simulation\.steps=3: draft=eagle1 is trained without simulation; set draft\.simulation=null$",
        ),
        (
            [*SMOKE, "draft=eagle1", "draft.simulation={steps: 3}"],
            r"^draft\.simulation\.steps=3: .* set draft\.simulation=",
        ),
        ([*SMOKE, "draft=eagle3", "draft.simulation=null"], r"draft\.simulation=null: draft=eagle3 is trained by it"),
        ([*SMOKE, "draft=eagle1", "draft.simulation={steps: 3, decay: 0.8}"], r"set draft\.simulation=null"),
        ([*SMOKE, "draft=eagle1", "draft.train_lm_head=true"], r"draft\.train_lm_head=true: .* set it to false"),
        ([*SMOKE, "draft=eagle3", "target.tap_ids=null"], r"set target\.tap_ids=default"),
        ([*SMOKE, "draft=eagle3", "cache.signal=topk"], r"cache\.signal=topk"),
    ],
)
def test_wrong_keys_are_told_before_anything_is_loaded(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        check_config(cfg := composed(*overrides))
        check_head(cfg)
    assert "\n" not in str(caught.value)


def test_right_keys_pass() -> None:
    for overrides in (
        [*SMOKE, "draft=eagle3"],
        [*SMOKE, "draft=eagle1"],
        ["+experiment=smoke"],
        ["+experiment=quickstart", "draft=eagle1", "draft.simulation=null"],
        ["+experiment=quickstart", "draft=gpt2_30m", "~draft.simulation"],
    ):
        check_config(cfg := composed(*overrides))
        check_head(cfg)


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
    with pytest.raises(UserError, match=r"draft\.num_attention_heads=64: leaves heads of 1 channels"):
        build_eagle(target=gpt2, draft_vocab_size=10, num_attention_heads=64)


@pytest.mark.parametrize("version", ["eagle3", "eagle1"])
def test_the_key_that_was_set_is_blamed(target: Target, version: str) -> None:
    build = partial(build_eagle, target=target, kind=version, draft_vocab_size=None)
    with pytest.raises(UserError, match=r"^draft\.num_attention_heads=3: must divide the target's hidden size of 64$"):
        build(num_attention_heads=3)
    for more in ({}, {"num_attention_heads": 4}):
        with pytest.raises(UserError, match=r"^draft\.num_key_value_heads=3: must divide draft\.num_attention_heads=4"):
            build(num_key_value_heads=3, **more)
    assert build(num_attention_heads=1).config.num_key_value_heads == 1

    config = LlamaConfig(
        vocab_size=259, hidden_size=48, intermediate_size=48, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3,
    )  # fmt: skip
    other = Target(LlamaForCausalLM(config), byte_tokenizer(), name="three", tap_ids=[0, 1])
    build = partial(build_eagle, target=other, kind=version, draft_vocab_size=None)
    with pytest.raises(UserError, match=r"^draft\.num_attention_heads=4: no multiple of the target's 3 key and value"):
        build(num_attention_heads=4)
    assert build(num_attention_heads=4, num_key_value_heads=2).config.num_key_value_heads == 2
    assert build(num_attention_heads=12).config.num_key_value_heads == 3


def test_a_key_of_another_draft_names_the_drafts_that_have_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for draft, override, told in (
        ("eagle1", "draft.simulation.steps=3", "the draft chosen here has no such key (draft=eagle3 has it); leave"),
        ("eagle3", "draft.n_layer=2", "the draft chosen here has no such key (draft=gpt2_30m, draft=gpt2_tiny has it)"),
        ("eagle3", "draft.n_layers=2", "unknown key; `--cfg job` prints all keys"),
    ):
        monkeypatch.setattr("sys.argv", ["distill", *SMOKE[:2], f"draft={draft}", override])
        with pytest.raises(SystemExit) as caught:
            train.distill.main()
        err = capsys.readouterr().err
        assert caught.value.code == 2 and err.startswith(f"error: {override}: {told}") and err.count("\n") == 1, err


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_shapes_left_null_are_those_of_the_target(target: Target, kind: str) -> None:
    """GPT-2 names neither heads for keys nor an MLP width nor a head's width."""
    gpt2 = load_target("random:tiny_gpt2", dtype="fp32", device="cpu", tap_ids=[0, 1, 3])
    draft = composed(*SMOKE[:2], f"draft={kind}", *(["draft.draft_vocab_size=10"] if kind == "eagle3" else [])).draft
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings")
    for model, shape in ((target, (4, 2, 16, 128, 1024)), (gpt2, (4, 4, 16, 192, 256))):
        config = instantiate(draft, target=model).config
        assert tuple(getattr(config, name) for name in names) == shape
        assert config.rope_parameters["rope_theta"] == 10000 and config.hidden_size == 64
        head = instantiate(draft, target=model, num_attention_heads=2, num_key_value_heads=1)
        assert head.block.self_attn.k_proj.out_features == head.config.head_dim == (16 if model is target else 32)


def test_taps_are_looked_at_in_small_batches(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, rows, sizes = SignalSpec("hidden", tap_ids=target.tap_ids), make_rows([30, 7, 100, 40, 3, 3, 60, 90]), []
    at_once = some_taps(target, rows, spec, batch_tokens=10_000)
    states = Target.states
    monkeypatch.setattr(Target, "states", lambda self, ids: sizes.append(ids.numel()) or states(self, ids))
    torch.testing.assert_close(some_taps(target, rows, spec, batch_tokens=64), at_once, atol=2e-2, rtol=2e-2)  # bf16
    assert max(sizes) == 100 and len(sizes) > 4  # a row is read whole
    first = rows.loss_mask[: 30 + 7 + 100].sum()
    torch.testing.assert_close(some_taps(target, rows, spec, max_tokens=140), at_once[:first], atol=2e-2, rtol=2e-2)
    assert len(some_taps(target, rows, spec, max_tokens=1)) == rows.loss_mask[:30].sum()  # one row at least
    assert len(some_taps(target, rows, spec, num_rows=2)) == rows.loss_mask[:37].sum()
