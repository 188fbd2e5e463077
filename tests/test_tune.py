"""Tuning: predictions from invented profiles equal formulas and brute force, the replay equals the loop, and a run from
end to end."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import MistralConfig, MistralForCausalLM

import eval.tune
import eval.tune_steps
from eval.drafters import check_attention, check_ragged, make_drafter
from eval.entry import CONF_DIR
from eval.loop import speculative_decode
from eval.ngram import NgramDrafter
from eval.run import Pair
from eval.skill_file import own_command, skill_text
from eval.theory import expected_speedup, expected_tokens
from eval.tree import TreeShape
from eval.tune_predict import (
    Machine,
    Measured,
    Plain,
    break_even_alpha,
    chain_shapes,
    choose,
    predict,
    ranked,
    shortlist,
    tree_shapes,
)
from eval.tune_profile import DraftProfile, TargetProfile, between, profile_target
from eval.tune_replay import (
    Replay,
    Text,
    WideTree,
    rank_shares,
    replay_chain,
    replay_trees,
    rounds_of,
    wide_shape,
    wide_trees,
)
from eval.tune_steps import alpha_at_depth
from eval.tune_workload import PROSE_TOKENS, read_workload
from models.errors import UserError
from models.sampling import SamplingParams
from models.target import Target, load_target
from models.tiny import byte_tokenizer
from tests.test_loop import first_blocks, prompts
from tests.test_medusa import random_heads
from tests.test_tree_drafters import random_head

NO_LOOP = {"chain": {1: 0.0}, "tree": {1: 0.0}, "ngram": {1: 0.0}}


@pytest.fixture(scope="module")
def target():
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


# --- prediction on invented profiles ---------------------------------------------------------------------------------


def geometric(alpha: float, num_places: int, depth: int) -> Replay:
    return Replay(np.tile(alpha ** np.arange(1, depth + 1), (num_places, 1)), np.full(num_places, depth))


def machine(*, per_token: float, draft_step: float, width_cost: float = 0.0) -> Machine:
    """A target step is one second, each further token of a forward `per_token`, a draft step `draft_step`."""
    lengths = range(1, 10)
    profile = TargetProfile(100, *({n: 1 + per_token * (n - 1) for n in sizes} for sizes in ((1, 2, 9), (9, 25, 61))))
    levels = {w: draft_step + width_cost * w for w in (1, 4, 6, 10)}
    draft = DraftProfile(0.0, {0.0: {k: k * draft_step for k in lengths}}, levels, levels)
    return Machine(profile, draft, NO_LOOP)


def long_plain() -> Plain:
    return Plain(step_s=1.0, prefill_s=0.0, num_tokens=1_001)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.9])
def test_tau_of_independent_acceptance_is_the_formula(alpha):
    replay = geometric(alpha, 4_000, 8)
    for draft_len in (1, 3, 8):
        rounds, starts = rounds_of(replay, draft_len)
        np.testing.assert_allclose(4_000 / rounds, expected_tokens(alpha, draft_len), rtol=3e-3)
        assert starts[0] == 1 and starts.max() <= 1 + 1e-12


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("draft_step", [0.02, 0.1, 0.4])
def test_the_best_chain_is_that_of_the_formulas(alpha, draft_step):
    """Also where every further token of a forward costs a tenth of a step."""
    setting = machine(per_token=0.1, draft_step=draft_step)
    replays = [geometric(alpha, 2_000, 8)]
    found = [predict(s, replays, setting, long_plain(), temperature=0.0, run="r") for s in chain_shapes(8)]
    lengths = np.arange(1, 9)
    expected = expected_speedup(alpha, lengths, draft_step, 1 + 0.1 * lengths)
    np.testing.assert_allclose([c.speedup for c in found], expected, rtol=1e-2)
    assert expected[ranked(found)[0].shape.depth - 1] == pytest.approx(expected.max(), rel=1e-3)  # two may tie


def test_rounds_are_counted_as_the_loop_walks():
    """Accepted lengths 2, 0, 1, 3, 0, 0 at six places: with K = 3 rounds start at 0 and 3 and cover all, with K = 1 at
    0, 2, 4 and 5."""
    lengths = np.array([2, 0, 1, 3, 0, 0])
    replay = Replay((lengths[:, None] > np.arange(3)).astype(float), np.full(6, 3))
    assert rounds_of(replay, 3)[0] == 2
    assert np.flatnonzero(rounds_of(replay, 3)[1]).tolist() == [0, 3]
    assert np.flatnonzero(rounds_of(replay, 1)[1]).tolist() == [0, 2, 4, 5]


def invented_tree(generator: np.random.Generator, depth: int, width: int) -> WideTree:
    """Scores as a draft gives them, all candidates; the text follows one of its children at every level, or leaves."""
    parents, depths, ranks, scores = [], [], [], []
    level: list[tuple[int, float]] = [(-1, 0.0)]
    for d in range(1, depth + 1):
        best = sorted(level, key=lambda node: -node[1])[:width]
        level = []
        for parent, score in best:
            for rank, logprob in enumerate(np.sort(np.log(generator.dirichlet(np.full(width + 2, 0.4))))[::-1][:width]):
                level.append((len(parents), score + logprob))
                parents.append(parent)
                depths.append(d)
                ranks.append(rank)
                scores.append(score + logprob)
    path: list[int] = []
    for _ in range(int(generator.integers(0, depth + 1))):
        children = [n for n, parent in enumerate(parents) if parent == (path[-1] if path else -1)]
        if not children:
            break
        path.append(children[min(int(generator.geometric(0.5)) - 1, len(children) - 1)])
    return WideTree(*map(np.array, (parents, depths, ranks, scores)), path, depth)


def test_small_trees_out_of_the_wide_one_by_brute_force():
    generator = np.random.default_rng(0)
    wide = [invented_tree(generator, 4, 4) for _ in range(60)]
    shapes = [TreeShape.parse(name) for name in ("dynamic_d4_k4_n7", "dynamic_d2_k4_n5", "static_2x1x1", "static_4x3")]
    found = replay_trees(wide, shapes)
    for place, tree in enumerate(wide):
        for shape in shapes:
            kept: set[int] = set()
            if shape.kind == "dynamic":
                fitting = [n for n in range(len(tree.parents)) if tree.depth[n] <= shape.depth]
                kept = set(sorted(fitting, key=lambda n: -tree.scores[n])[: shape.total_tokens])
            else:
                for n in range(len(tree.parents)):
                    is_behind = tree.parents[n] < 0 or tree.parents[n] in kept
                    if tree.depth[n] <= shape.depth and is_behind and tree.rank[n] < shape.children[tree.depth[n] - 1]:
                        kept.add(n)
            accepted = next((i for i, node in enumerate(tree.path) if node not in kept), len(tree.path))
            assert found[shape].survival[place].sum() == accepted
    assert {int(r.survival.sum(1).max()) for r in found.values()} >= {2, 3}


def test_a_machine_where_verification_is_dear_picks_a_small_tree():
    generator = np.random.default_rng(1)
    wide = [invented_tree(generator, 4, 4) for _ in range(300)]
    shapes = tree_shapes(4, 24, 4)
    replays = replay_trees(wide, shapes)

    def best(per_token: float):
        setting = machine(per_token=per_token, draft_step=0.05)
        return ranked(predict(s, [replays[s]], setting, long_plain(), temperature=0.0, run="r") for s in shapes)[0]

    cheap, dear = best(0.001), best(0.2)
    assert cheap.num_nodes >= 16 and dear.num_nodes <= 5
    assert cheap.tau > dear.tau and cheap.speedup > dear.speedup


def measured(candidate, speedup) -> Measured:
    return Measured(candidate, speedup, (candidate.tau,) * 3, candidate.speedup)


def test_without_acceptance_plain_decoding_is_chosen():
    setting = machine(per_token=0.05, draft_step=0.1)
    none = [
        predict(s, [geometric(0.0, 500, 8)], setting, long_plain(), temperature=0.0, run="r") for s in chain_shapes(8)
    ]
    assert all(c.speedup < 1 for c in none) and ranked(none)[0].method == "chain_k1"
    assert choose([measured(c, (c.speedup, c.speedup - 0.05, c.speedup + 0.05)) for c in none]) is None
    # a gain that the interval does not show is none
    assert choose([measured(none[0], (1.05, 0.98, 1.1))]) is None
    assert choose([measured(none[0], (1.1, 1.05, 1.2)), measured(none[1], (1.2, 1.01, 1.4))]).candidate == none[1]


def test_prefill_and_start_of_the_draft_dilute_the_gain():
    setting = machine(per_token=0.0, draft_step=0.0)
    plain = Plain(step_s=1.0, prefill_s=10.0, num_tokens=101)
    [found] = [predict(TreeShape.chain(1), [geometric(1.0, 400, 1)], setting, plain, temperature=0.0, run="r")]
    assert found.tau == 2 and found.speedup == pytest.approx(110 / 60)
    assert found.with_tau(1.0, plain).speedup == pytest.approx(1)


def test_ngram_rounds_without_a_match_cost_a_plain_step():
    replay = Replay(np.array([[1.0, 1.0], [0, 0], [0, 0], [0, 0], [0, 0]]), np.array([2, 0, 0, 0, 0]))
    setting = Machine(machine(per_token=0.5, draft_step=0.0).target, None, NO_LOOP, {"ngram": 0.25})
    found = predict(TreeShape("ngram", 2, ngram=3), [replay], setting, long_plain(), temperature=0.0, run="r")
    assert found.run is None and found.tau == 5 / 3  # rounds at 0, 3 and 4
    assert found.num_nodes == 2 / 3 and found.round_s == pytest.approx((2.0 + 1.0 + 1.0) / 3 + 0.25)


def test_break_even_by_hand():
    assert break_even_alpha(1, 1.5) == pytest.approx(0.5)  # 1 + alpha
    assert break_even_alpha(4, 1.0) == 0 and break_even_alpha(2, 3.5) is None
    alpha = break_even_alpha(4, 1.9)
    np.testing.assert_allclose(expected_tokens(alpha, 4), 1.9)
    setting = machine(per_token=0.1, draft_step=0.1)
    found = predict(TreeShape.chain(4), [geometric(0.5, 2_000, 4)], setting, long_plain(), temperature=0.0, run="r")
    assert found.break_even_tau == pytest.approx(1.8)
    at_even = predict(
        TreeShape.chain(4),
        [geometric(found.break_even_alpha, 4_000, 4)],
        setting,
        long_plain(),
        temperature=0.0,
        run="r",
    )
    assert at_even.speedup == pytest.approx(1, abs=3e-3)


def test_what_is_measured_is_of_different_kinds():
    setting = machine(per_token=0.05, draft_step=0.05)
    chains = [
        predict(s, [geometric(0.8, 500, 8)], setting, long_plain(), temperature=0.0, run="a") for s in chain_shapes(8)
    ]
    others = [
        predict(s, [geometric(0.3, 500, 8)], setting, long_plain(), temperature=0.0, run="b") for s in chain_shapes(8)
    ]
    chosen = shortlist([*chains, *others], 4)
    assert [c.run for c in chosen].count("b") == 1 and chosen[0] == ranked(chains)[0]
    assert len(set(chosen)) == 4 and shortlist(chains[:2], 4) == ranked(chains[:2])


def test_between_and_beyond_what_was_measured():
    assert between({1: 1.0, 3: 2.0, 5: 6.0}, 2) == 1.5
    assert between({1: 1.0, 3: 2.0, 5: 6.0}, 7) == 10 and between({1: 1.0, 3: 2.0}, 0) == 1
    assert between({4: 3.0}, 9) == 3 and between({1: 2.0, 2: 1.0}, 9) == 1  # noise is no speed-up
    np.testing.assert_allclose(between({1: 1.0, 2: 2.0}, np.array([1.5, 4.0])), [1.5, 4.0])


# --- the replay against the loop -------------------------------------------------------------------------------------


def loop_rounds(target, draft, prompt, method, **options) -> list[int]:
    result = speculative_decode(target, draft, prompt, method=method, max_new_tokens=24, eos_token_ids=(), **options)
    return [r.accepted for r in result.rounds]


@pytest.mark.parametrize("kind", ["draft", "eagle3", "eagle1", "medusa"])
def test_the_replay_walks_the_very_rounds_of_the_greedy_loop(target, kind):
    makers = {"draft": lambda: first_blocks(target.model, 7), "medusa": lambda: random_heads(target, num_heads=4)}
    draft = makers.get(kind, lambda: random_head(target, kind))()
    options = {"vocab_size": target.vocab_size, "params": SamplingParams(), "draft_sampling": "probabilistic"}
    chain, wide = make_drafter(draft, TreeShape.chain(4), **options), make_drafter(draft, wide_shape(3, 10), **options)
    trees = [TreeShape.parse(name) for name in ("dynamic_d3_k4_n8", "dynamic_d3_k10_n30", "static_3x2x1")]
    total = 0
    for prompt in prompts(2):
        answer = speculative_decode(target, None, prompt, max_new_tokens=24, eos_token_ids=()).token_ids
        text = Text(prompt, answer)
        replayed = {TreeShape.chain(k): replay_chain(target, chain, text, SamplingParams(), 4) for k in (2, 4)}
        replayed |= replay_trees(wide_trees(target, wide, text, 3), trees)
        for shape, replay in replayed.items():
            rounds, starts = rounds_of(replay, shape.depth)
            accepted = replay.survival[:, : shape.depth].sum(1)[starts == 1].astype(int).tolist()
            assert accepted == loop_rounds(target, draft, prompt, shape) and len(accepted) == rounds
            total += sum(accepted)
    assert total > 10 or kind != "draft"


def test_prompt_lookup_replayed_is_prompt_lookup(target):
    shape = TreeShape.parse("ngram_n3_k3")
    prompt = [7, 8, 9, 10] * 5
    answer = speculative_decode(target, None, prompt, max_new_tokens=24, eos_token_ids=()).token_ids
    replay = replay_chain(target, NgramDrafter(shape), Text(prompt, answer), SamplingParams(), 3)
    starts = rounds_of(replay, 3)[1] == 1
    assert replay.survival.sum(1)[starts].astype(int).tolist() == loop_rounds(target, None, prompt, "ngram_n3_k3")
    assert replay.survival.sum() > 5


@pytest.mark.parametrize("method", ["chain_k3", "dynamic_d2_k3_n6"])
def test_sampled_acceptance_replayed_is_that_of_the_loop(target, method):
    draft, shape = first_blocks(target.model, 7), TreeShape.parse(method)
    options = {"vocab_size": target.vocab_size, "params": SamplingParams(1.0), "draft_sampling": "probabilistic"}
    drafter = make_drafter(draft, shape if shape.kind == "chain" else wide_shape(2, 10), **options)
    rounds = places = 0.0
    taken, emitted = 0, 0
    for seed, prompt in enumerate(prompts(6)):
        sampling = {"temperature": 1.0, "max_new_tokens": 32, "eos_token_ids": (), "seed": seed}
        text = Text(prompt, speculative_decode(target, None, prompt, **sampling).token_ids)
        if shape.kind == "chain":
            replay = replay_chain(target, drafter, text, SamplingParams(1.0), 3)
            assert (np.diff(replay.survival, axis=1) <= 0).all() and 0 < replay.survival[:, 0].mean() < 1
        else:
            replay = replay_trees(wide_trees(target, drafter, text, 2), [shape])[shape]
        rounds, places = rounds + rounds_of(replay, shape.depth)[0], places + len(replay.survival)
        result = speculative_decode(target, draft, prompt, method=shape, **sampling)
        taken, emitted = taken + len(result.rounds), emitted + len(result.token_ids) - 1
    assert places / rounds == pytest.approx(emitted / taken, rel=0.12)  # 186 tokens each, drawn anew


def test_rank_shares_by_hand():
    parents, depth = np.array([-1, -1, 0, 0]), np.array([1, 1, 2, 2])
    rank, scores = np.array([0, 1, 0, 1]), np.zeros(4)
    trees = [WideTree(parents, depth, rank, scores, path, 2) for path in ([0, 3], [0], [1], [])]
    shares = rank_shares([trees], 2)
    assert shares[0][:3] == [0.5, 0.25, 0] and shares[1][:3] == [0, 0.5, 0]  # node 1 has no children
    ending = [WideTree(parents, depth, rank, scores, [0], 1)] * 4  # the text's last token: nothing stands behind it
    assert rank_shares([trees, ending], 2)[1] == shares[1]


@pytest.mark.parametrize("num_places", [1, 4, 50])
def test_a_draft_that_is_always_right_is_accepted_at_every_depth_that_a_text_has(num_places):
    ahead = np.arange(num_places, 0, -1)
    replay = Replay((ahead[:, None] > np.arange(6)).astype(float), np.full(num_places, 6))
    assert alpha_at_depth([replay]) == [1.0] * min(6, num_places) + [None] * max(0, 6 - num_places)


# --- workloads -------------------------------------------------------------------------------------------------------


def test_workloads(tmp_path):
    tokenizer = byte_tokenizer()
    assert [p.set_name for p in read_workload("gsm8k", tokenizer, limit=3, max_tokens=4_000)] == ["gsm8k"] * 3
    prose = read_workload("prose", tokenizer, limit=5, max_tokens=200)
    assert {len(p.token_ids) for p in prose} == {PROSE_TOKENS} and len({p.prompt_id for p in prose}) == 5
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "Why?"}\n{"messages": [{"role": "user", "content": "How?"}]}\n{"text": "' + "x" * 300 + '"}\n'
    )
    assert [p.text for p in read_workload(str(file), tokenizer, limit=9, max_tokens=200)] == ["Why?", "How?"]
    for source, told in (("nope", "no such set or file"), (str(tmp_path / "no.jsonl"), "no such file")):
        with pytest.raises(UserError, match=f"^tune.prompts={re.escape(source)}: .*{told}"):
            read_workload(source, tokenizer, limit=3, max_tokens=100)
    with pytest.raises(UserError, match="none of 3 prompts has 2 to 3 tokens"):
        read_workload(str(file), tokenizer, limit=3, max_tokens=3)


# --- all of it -------------------------------------------------------------------------------------------------------


def small(**changes):
    settings = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "tune" / "default.yaml"))
    sizes = {"num_profiled": 1, "num_measured": 2, "max_new_tokens": 8, "repeats": 1, "max_chain": 3, "max_nodes": 8}
    return settings | sizes | {"prompts": "prose"} | changes


def test_a_run_end_to_end_and_its_skill_file(target, capsys):
    config = OmegaConf.create({"target": {"source": "package:tiny"}})
    untapped = load_target("random:tiny_llama", dtype="fp32", device="cpu")  # of a run that reads no taps
    pairs = {
        "model": Pair(untapped, first_blocks(target.model, 7), "model", "model", config, None),
        "head": Pair(target, random_head(target), "head", "head", config, None),
    }
    content = json.loads(json.dumps(eval.tune.tune(pairs, small())))
    printed = capsys.readouterr().out
    assert printed.count("predicted and measured") == 2
    assert content["workload"]["is_measured_anew"] and set(content["temperatures"]) == {"0", "1"}
    for of_t in content["temperatures"].values():
        assert len(of_t["measured"]) == 4 and len(of_t["predicted"]) == eval.tune.SHOWN
        assert set(of_t["acceptance"]) == {"head", "model"}
        assert {c["run"] for c in of_t["best_of_each_kind"]} == {"head", "model", None}
    # every section, for whatever is chosen
    content["temperatures"]["1"]["choice"] = None
    for number, m in enumerate(content["temperatures"]["0"]["measured"]):
        content["temperatures"]["0"]["choice"] = None if number == 3 else m
        text = skill_text(content)
        assert text.startswith("---\nname: speculative-tuning\ndescription: ")
        headings = re.findall(r"^## (.*)$", text, flags=re.M)
        assert headings == [
            "When to use", "What this machine takes", "Temperature 0", "Temperature 1", "Flags",
            "When to fall back to plain decoding", "Limits",
        ]  # fmt: skip
        assert (f"Use `{m['method']}`" in text) == (number < 3) and ("T = 0: always" in text) == (number == 3)


def skill_content() -> dict:
    chain, tree = (
        {
            "run": "mine", "method": method, "temperature": 0.0, "tau": 2.2, "num_nodes": 3, "round_s": 0.03,
            "start_s": 0.0, "speedup": 1.6, "break_even_tau": 1.4, "break_even_alpha": alpha,
            "measured_speedup": [1.7, 1.6, 1.8], "measured_tau": [2.3, 2.2, 2.4], "speedup_at_measured_tau": 1.65,
            "error": -0.05,
        }
        for method, alpha in (("chain_k3", 0.3), ("dynamic_d5_k4_n8", None))
    )  # fmt: skip
    of_t = {
        "acceptance": {},
        "predicted": [],
        "best_of_each_kind": [chain, tree],
        "measured": [tree, chain],
        "choice": tree,
    }
    return {
        "name": "prose", "command": "python -m eval.tune", "git_sha": "0" * 40, "device": "a processor",
        "dtype": "bfloat16", "versions": {"torch": "2"}, "target": {"name": "some-llama"},
        "target_config": {"model_type": "llama", "num_hidden_layers": 30},
        "drafts": {"mine": {"kind": "eagle3", "folder": "checkpoints/mine"}},
        "workload": {
            "source": "prose", "num_profiled": 2, "num_measured": 2, "is_measured_anew": True, "prompt_tokens": 100,
            "answer_tokens": 96, "max_new_tokens": 96,
        },
        "target_profile": {"context": 148, "causal_s": {"1": 0.02, "4": 0.022}, "tree_s": {"9": 0.026}},
        "draft_profiles": {}, "is_disturbed": False,
        "temperatures": {"0": of_t, "1": of_t | {"choice": None}},
    }  # fmt: skip


def test_models_with_a_window_are_tuned_for_chains():
    def model() -> MistralForCausalLM:
        return MistralForCausalLM(
            MistralConfig(
                vocab_size=259, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, sliding_window=8, bos_token_id=1, eos_token_id=2,
            )
        ).eval()  # fmt: skip

    window = Target(model(), byte_tokenizer(), name="window")
    config = OmegaConf.create({"target": {"source": "package:tiny"}})
    content = eval.tune.tune({"a": Pair(window, model(), "a", "a", config, None)}, small(temperatures=[0.0]))
    found = {TreeShape.parse(c["method"]).kind for c in content["temperatures"]["0"]["predicted"]}
    assert found == {"chain", "ngram"}
    full = load_target("random:tiny_llama", dtype="fp32", device="cpu")
    assert eval.tune_steps.Draft.of(model(), full, 4).max_width == 0  # of the draft alone
    for models in ([window.model], [full.model, model()]):
        check_attention(models, [TreeShape.chain(3), TreeShape.parse("ngram_n3_k5")], key="compare.methods")
        with pytest.raises(UserError, match=r"^compare\.methods=static_2x1: needs full attention"):
            check_attention(models, [TreeShape.chain(3), TreeShape.parse("static_2x1")], key="compare.methods")
        with pytest.raises(UserError, match=r"^compare\.batch_sizes=\[4\]: batches of ragged rows"):
            check_ragged(models, setting="compare.batch_sizes=[4]")


def test_long_chains_are_profiled_not_extrapolated(target):
    profile = profile_target(target, list(range(3, 60)), max_chain=16, max_tokens=5, repeats=1)
    assert max(profile.causal_s) == 17 and max(profile.tree_s) == 5


def test_one_prompt_shows_nothing(target, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"prompt": "What is a draft?"}\n')
    pair = Pair(target, None, "none", "no draft", OmegaConf.create({"target": {"source": "package:tiny"}}), None)
    with pytest.raises(UserError, match=r"^tune\.prompts=.*one\.jsonl: holds one prompt"):
        eval.tune.tune({"none": pair}, small(prompts=str(tmp_path / "one.jsonl")))


def test_a_disturbed_profile_is_taken_again_and_told(target, monkeypatch, capsys):
    """Drafted tokens would look cheaper than they are where the plain step was timed in a busy moment."""
    assert not TargetProfile(8, {1: 24.2, 2: 23.6, 4: 24.7}, {}).is_disturbed  # as alike as a quiet machine times them
    disturbed, quiet = (TargetProfile(8, {1: 1.0, 4: s}, {}) for s in (0.9, 1.1))
    taken = [disturbed, quiet, quiet]
    monkeypatch.setattr(eval.tune_steps, "profile_target", lambda *arguments, **options: taken.pop(0))
    text = Text((1, 2, 3), (4, 5))
    assert eval.tune_steps.profile_machine(target, {}, [text], small())[0] is quiet and len(taken) == 1
    assert capsys.readouterr().out.count("something else ran meanwhile") == 1
    taken = [disturbed] * 4
    found = eval.tune_steps.profile_machine(target, {}, [text], small())[0]
    assert found.is_disturbed and len(taken) == 1
    assert "promise too much" in skill_text(skill_content() | {"is_disturbed": True})
    assert "promise too much" not in skill_text(skill_content())


def test_flags_of_the_engines():
    content = skill_content()
    text = skill_text(content)
    assert "name: speculative-tuning-prose\n" in text and "T = 1: none; decode plainly" in text
    own = "run=checkpoints/mine 'decode.methods=[dynamic_d5_k4_n8]' 'decode.temperatures=[0]' decode.fallback=auto"
    assert own in text
    config = json.loads(re.search(r"--speculative-config '(.*)'", text)[1])
    assert config == {"method": "eagle3", "model": "exports/mine-vllm", "num_speculative_tokens": 3}
    assert "--speculative-algorithm EAGLE3" in text
    assert "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 9" in text
    assert "exports/mine-trtllm/trtllm.yaml`, with `max_draft_len: 3`" in text
    assert "where tau falls below 1.40 (measured here: 2.30)" in text
    content["temperatures"]["0"]["choice"] = content["temperatures"]["0"]["measured"][1]
    text = skill_text(content)
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in text
    assert "fewer than 30% of the judged tokens are accepted" in text
    content["target_config"]["model_type"] = "gpt2"
    assert "serves no eagle3 head for a gpt2 target" in skill_text(content)
    content["temperatures"]["0"]["choice"] |= {"run": None, "method": "ngram_n3_k5"}
    config = json.loads(re.search(r"--speculative-config '(.*)'", skill_text(content))[1])
    assert (config["method"], config["num_speculative_tokens"], config["prompt_lookup_max"]) == ("ngram", 5, 3)


@pytest.mark.parametrize(("draft", "run", "told"), [
    ({"kind": "eagle3", "folder": "checkpoints/mine"}, "mine", "-m eval.decode run=checkpoints/mine"),
    ({"kind": "eagle3", "folder": "checkpoints/mine"}, None, "-m eval.decode run=checkpoints/mine"),  # its target
    ({"kind": "draft_model", "folder": "small", "is_run": False}, "mine",
     "-m eval.decode target=hf target.source=large draft=hf draft.id=small"),
    (None, None, "-m eval.decode target=hf target.source=large draft=none"),
])  # fmt: skip
def test_the_own_command_decodes_the_pair_that_was_tuned(draft, run, told):
    content = skill_content()
    content["drafts"] = {"mine": draft} if draft else {}
    if not draft or not draft.get("is_run", True):
        own = ["draft=hf", "draft.id=small"] if draft else ["draft=none"]
        content["arguments"] = ["target=hf", "target.source=large", *own]
    choice = {"run": run, "method": "chain_k2" if run else "ngram_n3_k5", "temperature": 0.7}
    command = own_command(content, choice)
    assert told in command and "'decode.temperatures=[0.7]'" in command
    assert ("run=" in command) == bool(draft and draft.get("is_run", True))


def test_flags_say_what_was_measured_and_what_an_engine_refuses():
    content = skill_content()
    of_t = content["temperatures"]["0"]
    of_t["choice"] = of_t["measured"][1]
    assert "draft_sample_method" not in skill_text(content) and "Above T = 0" not in skill_text(content)
    # sampled chains were drawn from the draft, which is not vLLM's default
    content["temperatures"] = {"1": of_t | {"choice": of_t["choice"] | {"temperature": 1.0}}}
    assert '"draft_sample_method": "probabilistic"' in skill_text(content) and "Above T = 0" in skill_text(content)
    # vLLM drafts with every Medusa head of a folder
    content["drafts"]["mine"]["kind"] = "medusa"
    text = skill_text(content)
    assert "RUN=checkpoints/mine ARGS=export.draft_len=3" in text and "draft_sample_method" not in text
    # a GPT-2 draft of few positions
    content["drafts"]["mine"] |= {"kind": "draft_model", "model_type": "gpt2", "max_positions": 512}
    text = skill_text(content)
    assert "TensorRT-LLM's PyTorch backend has no gpt2 model, which the draft is" in text
    assert "--max-model-len 512`" in text and "--context-length 512`" in text
    # off the shelf: no export stands between
    content["drafts"]["mine"] |= {"model_type": "llama", "is_run": False, "folder": "some/small"}
    text = skill_text(content)
    assert '"model": "some/small"' in text and '"speculative_model": "some/small"' in text and "exports/" not in text


def run_main(monkeypatch, *overrides: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.tune", *overrides])
    eval.tune.main()


def test_the_entry_point_writes_both_files(tmp_path, monkeypatch):
    """Without a draft, too: n-grams and lookahead are what is left."""
    sizes = [f"tune.{key}={value}" for key, value in small(temperatures=[0.0]).items() if value is not None]
    sizes = [s.replace("'", "") for s in sizes]
    run_main(
        monkeypatch, "target=tiny_random", "draft=none", "dtype=fp32", "device=cpu", f"output_root={tmp_path}",
        "tune.name=mine", *sizes,
    )  # fmt: skip
    content = json.loads((tmp_path / "skill-speculative-tuning-mine.json").read_text())
    assert (tmp_path / "skill-speculative-tuning-mine.md").read_text() == skill_text(content)
    assert {m["run"] for m in content["temperatures"]["0"]["measured"]} == {None}
    assert any(c["method"].startswith("lookahead") for c in content["temperatures"]["0"]["best_of_each_kind"])


@pytest.mark.parametrize(("override", "told"), [
    ("tune.lookahead=[chain_k3]", "tune.lookahead"), ("tune.name=a/b", "tune.name=a/b"), ("tune.runs=[a]", "tune.runs"),
    ("tune.lookahead=[nope]", "tune.lookahead=nope: no such method"),
])  # fmt: skip
def test_mistakes_get_one_line(override, told, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run_main(monkeypatch, "target=tiny_random", "draft=none", f"output_root={tmp_path}", override)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.startswith(f"error: {told}") and err.count("\n") == 1


def test_paths():
    assert eval.tune.skill_path("o", None) == Path("o/skill-speculative-tuning.md")
    assert eval.tune.skill_path("o", "gsm8k") == Path("o/skill-speculative-tuning-gsm8k.md")
    assert torch.is_inference_mode_enabled() is False
