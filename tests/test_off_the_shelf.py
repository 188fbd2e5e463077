"""Off-the-shelf drafts as experiments: judged as they are, then trained on, with tiny models in the hub's place."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from eval.decode import decode_pair
from eval.entry import CONF_DIR
from eval.results import read_results
from eval.run import load_pair
from models.errors import UserError
from models.tiny import byte_tokenizer, random_model
from train.distill import distill

EXPERIMENTS = {  # experiment: the hub's pair, and the shape that stands in for it
    "gpt2_medium_small": ("gpt2-medium", "gpt2", "tiny_gpt2"),
    "qwen3_32b_small": ("Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B", "tiny_llama"),
    "llama33_70b_small": ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "tiny_llama"),
}


def config(experiment: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose("decode", [f"+experiment={experiment}", *overrides])


@pytest.fixture
def small(tmp_path: Path, request: pytest.FixtureRequest) -> DictConfig:
    """The experiment with tiny models, a text of ours and folders of this test."""
    shape = EXPERIMENTS[request.param][2]
    draft = tmp_path / "off-the-shelf"
    random_model(shape, seed=1).save_pretrained(draft)
    byte_tokenizer().save_pretrained(draft)
    lines = [" ".join(f"{word}{number}" for word in ("draft", "target") * 6) for number in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return config(
        request.param, f"target.source=random:{shape}", "target.device_map=null", "dtype=fp32", "device=cpu",
        f"draft.id={draft}", f"data.sources=[{{path: {tmp_path / 'texts.jsonl'}, kind: text}}]", "data.max_length=64",
        "data.held_out_fraction=0.2", "trainer.max_steps=2", "trainer.batch_tokens=256", "trainer.val_every_steps=2",
        "alpha.max_tokens=200", "decode.sets=[mt_bench]", "decode.num_prompts=1", "decode.max_new_tokens=4",
        "decode.methods=[chain_k2]", "decode.plain=false",
        *(f"{name}_root={tmp_path / name}" for name in ("checkpoint", "output", "cache")),
    )  # fmt: skip


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_experiment_names_its_pair(experiment: str) -> None:
    cfg = config(experiment)
    target, draft, _ = EXPERIMENTS[experiment]
    assert (cfg.target.source, cfg.draft.kind, cfg.draft.id, cfg.draft.init) == (target, "hf", draft, "scratch")


@pytest.mark.parametrize("small", EXPERIMENTS, indirect=True)
def test_judged_as_it_is_and_then_as_trained(small: DictConfig, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    experiment = small.run
    # as it is: under a name of its own
    pair = load_pair(small, [f"+experiment={experiment}"])
    assert pair.run is None and pair.name == f"off-the-shelf-for-{small.target.name}"
    assert f"draft: {small.draft.id} as it is" in capsys.readouterr().out
    decode_pair(pair, OmegaConf.to_container(small.decode, resolve=True), output_root=small.output_root)
    before = read_results(tmp_path / "output" / pair.name / "results.json")
    assert before["draft"]["draft_weights"] == pair.draft_fingerprint["draft_weights"]
    assert before["metrics"]["tau_uncut/mt_bench/T0/chain_k2"]["value"] >= 1
    # trained on: the same command judges the run
    distill(small)
    trained = load_pair(small, [f"+experiment={experiment}"])
    assert trained.run.name == trained.name == experiment
    assert trained.draft_fingerprint["draft_weights"] != pair.draft_fingerprint["draft_weights"]


@pytest.mark.parametrize("small", ["qwen3_32b_small"], indirect=True)
def test_a_run_that_is_asked_for_is_never_replaced_by_the_draft_as_it_is(small: DictConfig) -> None:
    with pytest.raises(UserError, match="run=qwen3_32b_small: no such run"):
        load_pair(small, ["+experiment=qwen3_32b_small", "run=qwen3_32b_small"])
    (Path(small.checkpoint_root) / small.run).mkdir(parents=True)
    with pytest.raises(UserError, match="its training has not finished"):
        load_pair(small, ["+experiment=qwen3_32b_small"])
