"""EAGLE heads for a target whose head is padded beyond its tokenizer: such ids are neither learned nor drafted."""

# ruff: noqa: F811 (cache_root is a fixture of test_distill)

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_helpers import make_rows
from test_distill import TINY, cache_root, overrides  # noqa: F401

from data.draft_vocab import frequent_ids
from eval.alpha import evaluate_alpha
from eval.loop import speculative_decode
from eval.run import load_for
from models.eagle import EagleHead, build_eagle, load_eagle
from models.target import Target, load_target
from models.tiny import byte_tokenizer, random_model
from tests.test_head_mistakes import composed
from tests.test_loop import prompts
from train.distill import distill

NUM_IDS, WIDTH = 259, 320


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_llama with 61 ids too many, which would win every argmax."""
    folder = tmp_path_factory.mktemp("padded")
    model = random_model("tiny_llama")
    model.resize_token_embeddings(WIDTH, mean_resizing=False)
    model.get_output_embeddings().weight.data[NUM_IDS:] = 3 * model.get_output_embeddings().weight.data[65]
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    target = load_target(str(target_folder), dtype="fp32", device="cpu", tap_ids="default")
    assert (target.vocab_size, target.head_width) == (NUM_IDS, WIDTH)
    return target


def assert_drafts_real_ids(target: Target, head: EagleHead) -> None:
    for method in ("chain_k3", "static_3x2", "dynamic_d3_k3_n6"):
        for temperature in (0.0, 1.5):
            options = {"temperature": temperature, "max_new_tokens": 24, "eos_token_ids": ()}
            result = speculative_decode(target, head, prompts(1)[0], method=method, record_trees=99, **options)
            drafted = [token for tree in result.trees for token in tree.tokens]
            assert len(drafted) > 20 and max(drafted) < NUM_IDS and max(result.token_ids) < NUM_IDS
            if temperature == 0:
                plain = speculative_decode(target, None, prompts(1)[0], **options)
                assert result.token_ids == plain.token_ids


@pytest.mark.parametrize(("kind", "size"), [("eagle3", "null"), ("eagle3", 100), ("eagle1", "null")])
def test_training_and_decoding(
    tmp_path: Path, cache_root: Path, target_folder: Path, target: Target, kind: str, size: str | int
) -> None:
    more = [f"draft={kind}", "~draft.n_positions", f"draft.draft_vocab_size={size}", "trainer.max_steps=3"]
    more += ["trainer.val_every_steps=3", "alpha.max_tokens=null"]
    more += [f"target.source={target_folder}", *(["draft.simulation.steps=2"] if kind == "eagle3" else [])]
    given = [o for o in overrides(tmp_path, cache_root, *more) if "n_embd" not in o]
    folder = distill(composed(*given))
    metrics = json.loads((folder / "run.json").read_text())["metrics"]
    assert metrics["val/alpha"] == pytest.approx(metrics["alpha_expected/held_out/T1"], abs=1e-3)
    assert metrics["alpha_expected/held_out/T1"] > 0.02
    head = load_for(target, folder)
    assert head.config.vocab_size == WIDTH and head.config.draft_vocab_size == (100 if size == 100 else NUM_IDS)
    if kind == "eagle3":
        assert head.draft_vocab.max() < NUM_IDS
    assert_drafts_real_ids(target, head)


def test_the_draft_vocabulary_is_of_the_tokenizers_ids() -> None:
    rows = make_rows([50, 50], vocab_size=20)  # most ids never occur
    ids = frequent_ids(rows, 200, NUM_IDS)
    assert len(ids) == 200 == len(np.unique(ids)) and ids.max() < NUM_IDS


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_head_made_elsewhere_over_the_whole_width(target: Target, kind: str, tmp_path: Path) -> None:
    """Its padded ids are dropped when it is loaded; what it says of the others stays as it is."""
    ours = build_eagle(target=target, kind=kind, draft_vocab_size=None)
    ours.save_pretrained(tmp_path / "ours")
    wide = EagleHead(replace(ours.config, draft_vocab_size=WIDTH), target_head=target.logits)
    state = ours.state_dict()
    if kind == "eagle3":
        state |= {"d2t": torch.zeros(WIDTH, dtype=torch.int64), "t2d": torch.ones(WIDTH, dtype=torch.bool)}
        state["lm_head.weight"] = target.model.get_output_embeddings().weight.clone()
    wide.load_state_dict(state)
    wide.save_pretrained(tmp_path / "wide")
    loaded, expected = (load_eagle(tmp_path / name, target) for name in ("wide", "ours"))
    assert loaded.config == expected.config
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0, msg=name)
    rows = make_rows([20, 9], vocab_size=NUM_IDS)
    assert evaluate_alpha(target, loaded, rows) == evaluate_alpha(target, expected, rows)
    assert_drafts_real_ids(target, loaded)
