"""What each key of the config may hold, checked before anything is loaded: a mistake is told by its key, in one line.

Keys that are not listed here belong to what their group builds (`_target_`), which checks them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from eval.fallback import FALLBACKS
from models.drafts import build_draft
from models.eagle import build_eagle
from models.errors import UserError
from models.medusa import build_medusa
from models.servable import ENGINES


@dataclass(frozen=True)
class Rule:
    """accepts: whether a value is right; wanted: what to say where it is not ("must be ...")."""

    accepts: Callable[[Any], bool]
    wanted: str


def whole(low: int | None = None, high: int | None = None) -> Rule:
    limits = [f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)
    wanted = " ".join(["a whole number", *(["of"] if limits else []), " and ".join(limits)]).strip()
    return Rule(lambda v: _is_int(v) and (low is None or v >= low) and (high is None or v <= high), wanted)


def number(accepts: Callable[[float], bool], wanted: str) -> Rule:
    return Rule(lambda v: _is_number(v) and accepts(v), f"a number {wanted}")


def one_of(*choices: str) -> Rule:
    return Rule(lambda v: isinstance(v, str) and v in choices, " or ".join(choices))


def list_of(each: Rule, example: str, *, may_be_empty: bool = False) -> Rule:
    def accepts(value: Any) -> bool:
        return isinstance(value, list) and (may_be_empty or bool(value)) and all(map(each.accepts, value))

    return Rule(accepts, f"a list, each {each.wanted}, for example {example}")


def distinct(rule: Rule) -> Rule:
    """A list without repeats: a repeat would count its prompts twice and narrow the intervals."""
    return Rule(lambda v: rule.accepts(v) and len(set(v)) == len(v), f"{rule.wanted}, no value twice")


def optional(rule: Rule) -> Rule:
    return Rule(lambda v: v is None or rule.accepts(v), f"{rule.wanted}, or null")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


TEXT = Rule(lambda v: isinstance(v, str) and bool(v), "a text (quote a number: \"'5'\")")
FLAG = Rule(lambda v: isinstance(v, bool), "true or false")
TEMPERATURE = number(lambda v: v >= 0, "of at least 0")

TOP_LEVEL = {
    "run": optional(TEXT),
    "seed": whole(0, 2**32 - 1),
    "device": TEXT,
    "dtype": TEXT,
    "resume": TEXT,
    "overwrite": FLAG,
    "plan": FLAG,
    "prompts": optional(TEXT),
    "out": optional(TEXT),
    "to": optional(one_of(*ENGINES)),
    "folder": optional(TEXT),
    "checkpoint_root": TEXT,
    "output_root": TEXT,
    "cache_root": TEXT,
}
GROUPS: dict[str, dict[str, Rule]] = {
    "target": {
        "source": TEXT,
        "name": optional(TEXT),
        "revision": optional(TEXT),
        "tap_ids": Rule(
            lambda v: v in (None, "default") or (isinstance(v, list) and all(map(_is_int, v))),
            "a list of blocks such as [2,15,27], default, or null",
        ),
        "dtype": TEXT,
        "device": TEXT,
        "converted_root": TEXT,
    },
    "data": {
        "sources": Rule(
            lambda v: isinstance(v, list) and bool(v),
            "a list of sources, at least one, for example [{path: my_docs/, kind: text}]",
        ),
        "max_length": whole(2),
        "held_out_fraction": number(lambda v: 0 <= v < 1, "of at least 0 and below 1"),
        "max_train_tokens": optional(whole(1)),
        "max_held_out_tokens": optional(whole(1)),
        "seed": whole(),
    },
    "cache": {
        "mode": one_of("disk", "none"),
        "signal": TEXT,
        "top_k": whole(1),
        "shard_tokens": whole(1),
        "batch_tokens": whole(1),
        "name": optional(TEXT),
    },
    "draft": {
        "kind": one_of("gpt2", "hf", "eagle3", "eagle1", "medusa", "none"),
        "n_layer": whole(1),
        "n_head": whole(1),
        "n_embd": whole(1),
        "n_positions": whole(2),
        "init": TEXT,
        "id": optional(TEXT),
        # of heads
        "draft_vocab_size": optional(whole(1)),
        "train_lm_head": FLAG,
        "intermediate_size": optional(whole(1)),
        "num_attention_heads": optional(whole(1)),
        "num_key_value_heads": optional(whole(1)),
        "num_heads": whole(1, 16),  # of Medusa
        "num_layers": whole(1),
        "decay": number(lambda v: 0 < v <= 1, "above 0 and at most 1"),
        "simulation": Rule(
            lambda v: (
                v is None
                or (
                    isinstance(v, dict)
                    and v.keys() == {"steps", "decay"}
                    and whole(1, 64).accepts(v["steps"])
                    and number(lambda d: 0 < d <= 1, "").accepts(v["decay"])
                )
            ),
            "{steps: a whole number from 1 to 64, decay: a number above 0 and at most 1}",
        ),
    },
    "loss": {
        "name": TEXT,
        "temperature": number(lambda v: v > 0, "above 0"),
        "beta": number(lambda v: 0 <= v <= 1, "from 0 to 1"),
        "chunk_mb": whole(1),
    },
    "optim": {
        "betas": list_of(number(lambda v: 0 <= v < 1, "of at least 0 and below 1"), "[0.9,0.95]"),
    },
    "trainer": {
        "devices": Rule(lambda v: v == "auto" or (_is_int(v) and v > 0), "auto or a number of processes"),
        "num_nodes": whole(1),
        "strategy": TEXT,
        "num_workers": whole(0),
    },
    "decode": {
        "sets": distinct(list_of(TEXT, "[mt_bench]")),
        "num_prompts": optional(whole(1)),
        "max_new_tokens": whole(1),
        "methods": distinct(list_of(TEXT, "[chain_k4,static_3x2x1]")),
        "temperatures": distinct(list_of(TEMPERATURE, "[0.0,1.0]")),
        "draft_sampling": distinct(list_of(one_of("probabilistic", "greedy"), "[probabilistic]")),
        "plain": FLAG,
        "top_k": whole(0),
        "top_p": number(lambda v: 0 < v <= 1, "above 0 and at most 1 (off)"),
        "min_p": number(lambda v: 0 <= v < 1, "of at least 0 (off) and below 1"),
        "fallback": one_of(*FALLBACKS),
        "seed": whole(),
    },
    "alpha": {
        "temperatures": distinct(list_of(TEMPERATURE, "[0.0,1.0]")),
        "max_tokens": optional(whole(1)),
        "position_buckets": distinct(list_of(whole(1), "[64,128,256]", may_be_empty=True)),
    },
    "compare": {
        "runs": optional(list_of(TEXT, "[smollm2_eagle3,smollm2_30m]")),
        "methods": distinct(list_of(TEXT, "[chain_k3,ngram_n3_k5]")),
        "temperatures": distinct(list_of(TEMPERATURE, "[0.0,1.0]")),
        "sets": distinct(list_of(TEXT, "[mt_bench]")),
        "num_prompts": whole(1),
        "max_new_tokens": whole(2),
        "generate": FLAG,
        "batch_sizes": distinct(list_of(whole(1), "[4,16]", may_be_empty=True)),
        "num_batches": whole(1),
        "memory_prompts": whole(0),
        "seed": whole(),
    },
    "failure": {
        "parts": distinct(list_of(TEXT, "[temperature,batch]")),
        "methods": distinct(list_of(TEXT, "[chain_k3,dynamic_d5_k4_n8]")),
        "temperatures": distinct(list_of(TEMPERATURE, "[0.0,1.0]")),
        "draft_lens": distinct(list_of(whole(1, 1024), "[1,2,4]")),
        "batch_sizes": distinct(list_of(whole(1), "[1,4,16]")),
        "num_batches": whole(1),
        "sets": distinct(list_of(TEXT, "[mt_bench]")),
        "num_prompts": whole(1),
        "kind_prompts": whole(1),
        "prose_tokens": whole(1),
        "max_new_tokens": whole(2),
        "seed": whole(),
    },
    "export": {
        "dtype": one_of("auto", "bf16", "fp16", "fp32"),
        "draft_len": whole(1),
        "target_path": optional(TEXT),
        "licence": optional(TEXT),
        "any_family": FLAG,
    },
    "tune": {
        "name": optional(Rule(lambda v: isinstance(v, str) and v.replace("-", "").isalnum(), "letters, digits and -")),
        "prompts": TEXT,
        "runs": distinct(list_of(TEXT, "[smollm2_eagle3]", may_be_empty=True)),
        "num_profiled": whole(1),
        "num_measured": whole(1),
        "max_new_tokens": whole(4),
        "temperatures": distinct(list_of(TEMPERATURE, "[0.0,1.0]")),
        "max_chain": whole(1, 16),
        "max_nodes": whole(1, 256),
        "lookahead": distinct(list_of(TEXT, "[lookahead_w5_n3_g5]", may_be_empty=True)),
        "candidates": whole(1),
        "repeats": whole(1),
        "seed": whole(0),
    },
    "regenerate": {
        "turns": one_of("all", "first"),
        "num_samples": whole(1),
        "temperature": TEMPERATURE,
        "top_k": whole(0),
        "top_p": number(lambda v: 0 < v <= 1, "above 0 and at most 1 (off)"),
        "min_p": number(lambda v: 0 <= v < 1, "of at least 0 (off) and below 1"),
        "max_new_tokens": whole(1),
        "max_prompt_tokens": optional(whole(1)),
        "batch_size": whole(1),
        "seed": whole(0),
    },
}


BUILDERS = {
    "models.eagle.build_eagle": build_eagle,
    "models.medusa.build_medusa": build_medusa,
    "models.drafts.build_draft": build_draft,
}


def check_settings(cfg: DictConfig) -> None:
    """Raises UserError naming the first key that is unknown, missing or holds a wrong value."""
    for key, rule in TOP_LEVEL.items():
        if key in cfg:
            _check(key, cfg[key], rule)
    for group, rules in GROUPS.items():
        settings = cfg.get(group)
        if not isinstance(settings, DictConfig):
            raise UserError(f"{group}={settings}: must be a choice of conf/{group}")
        if "_target_" not in settings and settings.get("kind") != "none":  # else what it builds knows its keys
            if unknown := sorted(str(key) for key in settings if key not in rules):
                raise UserError(f"{group}.{unknown[0]}: unknown key; the keys are {', '.join(rules)}")
            if missing := [key for key in rules if key not in settings]:
                raise UserError(f"{group}.{missing[0]}: not given; it must be {rules[missing[0]].wanted}")
        if group == "draft":
            _check_draft_keys(settings)
        for key, rule in rules.items():
            if key in settings:
                _check(f"{group}.{key}", settings[key], rule)
    loggers = cfg.get("logger")
    if not isinstance(loggers, DictConfig) or not all(isinstance(node, DictConfig) for node in loggers.values()):
        raise UserError(f"logger={loggers}: must be csv or wandb (~logger.csv for none)")


def _check_draft_keys(draft: DictConfig) -> None:
    """Keys of another kind of draft, which an experiment or a command line brought along."""
    kind, builder = draft.get("kind"), BUILDERS.get(draft.get("_target_"))
    if builder is None:
        return
    if foreign := sorted(set(draft) - {"_target_", *signature(builder).parameters}):
        what = "a head" if builder is build_eagle else f"draft.kind={kind}"
        raise UserError(
            f"draft.{foreign[0]}={draft[foreign[0]]}: {what} has no such key; leave it out by '~draft.{foreign[0]}'"
        )
    if kind == "eagle1" and draft.get("simulation") is not None:
        given = draft.simulation
        inner = next(iter(given), "") if isinstance(given, DictConfig) else ""
        name, value = (f"draft.simulation.{inner}", given[inner]) if inner else ("draft.simulation", given)
        raise UserError(f"{name}={value}: draft=eagle1 is trained without simulation; set draft.simulation=null")


def _check(key: str, value: Any, rule: Rule) -> None:
    value = OmegaConf.to_container(value, resolve=True) if isinstance(value, (DictConfig, ListConfig)) else value
    if not rule.accepts(value):
        raise UserError(f"{key}={'null' if value is None else value}: must be {rule.wanted}")
