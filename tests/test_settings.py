"""A wrong value is told by its key before anything is loaded, by every entry point alike."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from eval.entry import CONF_DIR
from eval.settings import GROUPS, TOP_LEVEL, check_settings
from models.errors import UserError


def config(*overrides: str):
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return compose("distill", overrides=["+experiment=smoke", *overrides])


def test_every_key_without_a_class_of_its_own_has_a_rule():
    cfg = config()
    assert {key for key in cfg if key not in (*GROUPS, "logger")} == set(TOP_LEVEL)
    for group in ("data", "cache", "decode", "alpha"):
        assert set(cfg[group]) == set(GROUPS[group])
    of_drafts = set(config("draft=eagle3").draft) | set(config("draft=medusa").draft)
    for group, rules in GROUPS.items():
        present = set(cfg[group]) | (of_drafts if group == "draft" else set())
        assert set(rules) <= present, group


WRONG = [
    "seed=x", "seed=-1", "seed=1.5", "overwrite=maybe", "plan=2", "run=5", "device=5", "dtype=null", "resume=false",
    "output_root=null", "data.max_length=1", "data.max_length=1.5", "data.held_out_fraction=x",
    "data.held_out_fraction=2", "data.max_train_tokens=x", "data.max_train_tokens=0", "data.sources=x",
    "data.sources=[]", "data.seed=1.5", "+data.bogus=1", "~data.seed", "cache.top_k=x", "cache.top_k=2.5",
    "cache.top_k=null", "cache.shard_tokens=0", "cache.batch_tokens=-1", "cache.mode=ram", "cache.name=5",
    "draft.n_layer=0", "draft.n_head=x", "draft.n_embd=-4", "draft.init=5", "draft.kind=t5", "target.source=5",
    "target.tap_ids=x", "target.tap_ids=[a]", "loss.temperature=a", "loss.beta=null", "loss.chunk_mb=x",
    "optim.betas=0.9", "optim.betas=[a,b]", "optim.betas=null", "trainer.devices=x", "trainer.devices=true",
    "trainer.strategy=5", "alpha.temperatures=1.0", "alpha.temperatures=[-1]", "alpha.temperatures=[a]",
    "alpha.temperatures=[]", "alpha.temperatures=[inf]", "alpha.max_tokens=0", "alpha.max_tokens=x",
    "alpha.position_buckets=5", "alpha.position_buckets=[-3]", "+alpha.bogus=1", "decode.num_prompts=0",
    "decode.num_prompts=1.5", "decode.temperatures=1.0", "decode.temperatures=[1,1]", "decode.methods=chain_k4",
    "decode.max_new_tokens=x", "decode.top_p=0", "decode.min_p=1", "decode.seed=null", "decode.sets=mt_bench",
    "decode.sets=[a,a]", "decode.sets=null", "decode.draft_sampling=[soft]",
    "decode.draft_sampling=[greedy,greedy]", "decode.methods=[a,a]", "decode.methods=[]", "decode.plain=1",
    "decode.fallback=maybe", "tune.temperatures=1.0", "tune.max_chain=0", "tune.runs=a", "tune.name=a/b",
]  # fmt: skip


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_told_by_its_key(override):
    key = override.lstrip("+~").split("=")[0]
    with pytest.raises(UserError, match=rf"^{key}(=|: )") as caught:
        check_settings(config(override))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["data=null", "logger=null", "logger.csv=null"])
def test_a_group_that_is_no_group_is_named(override):
    cfg = config()
    key = override.split("=")[0].split(".")
    OmegaConf.update(cfg, ".".join(key), None, merge=False, force_add=True)
    with pytest.raises(UserError, match=f"^{key[0]}="):
        check_settings(cfg)


@pytest.mark.parametrize(
    "override", ["data.max_train_tokens=null", "alpha.max_tokens=null", "decode.num_prompts=null", "~logger.csv",
                 "alpha.position_buckets=[]", "target.tap_ids=default", "decode.temperatures=[0,1]"],
)  # fmt: skip
def test_what_is_allowed_passes(override):
    check_settings(config(override))
