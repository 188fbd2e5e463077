"""Measures by hand, prompts, near ties, the text view, and the entry point's files."""

import copy
import json
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch

import eval.decode
import eval.drafters
from eval.decode import check_decode, decode_pair, first_difference, method_name, methods_at, prompt_seed
from eval.drafters import Clock
from eval.loop import DecodeResult, Round, speculative_decode
from eval.measures import Method, Trial, accepted_histogram, decode_metrics, repeated_4gram_share
from eval.prompts import Prompt, load_prompts, prompt_ids
from eval.report import DECODE_COLUMNS, decode_row
from eval.results import Metric, merge_results
from eval.run import Pair
from eval.text_view import mark_accepted, text_view
from eval.tree import TreeShape
from models.errors import UserError
from models.target import Target
from models.tiny import byte_tokenizer, random_model
from tests.test_loop import first_blocks

DECODE = {
    "sets": ["mt_bench", "gsm8k"], "num_prompts": 2, "max_new_tokens": 12, "temperatures": [0.0, 1.0],
    "methods": ["chain_k3", "static_2x2x1", "dynamic_d3_k2_n5"], "draft_sampling": ["probabilistic", "greedy"],
    "plain": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "fallback": "never",
    "seed": 0,
}  # fmt: skip


def _round(drafted, judged, accepted, uncut=None, depth=4):
    uncut = accepted if uncut is None else uncut
    return Round(drafted=drafted, depth=depth, judged=judged, accepted=accepted, accepted_uncut=uncut)


def _result(rounds, num_tokens, **seconds):
    return DecodeResult(
        token_ids=list(range(num_tokens)),
        token_depth=[0] * num_tokens,
        finish_reason="length",
        rounds=rounds,
        **seconds,
    )


def _trial(rounds, num_tokens, prompt_id="0", has_plain=True):
    ours = _result(rounds, num_tokens, wall_s=2.0, prefill_s=0.5, target_s=0.9, draft_s=0.5, draft_forward_s=0.45)
    plain = _result([_round(0, 0, 0, depth=0)] * (num_tokens - 1), num_tokens, wall_s=3.0, target_s=2.4)
    return Trial("s", prompt_id, plain if has_plain else None, ours)


def _values(trials, method="chain_k4"):
    metrics = decode_metrics(trials, shape=TreeShape.parse(method), suffix="s")
    return {key.removesuffix("/s"): metric.value for key, metric in metrics.items()}


def test_every_measure_by_hand():
    """K = 4, accepted 4, 0, 2: no name means two things."""
    trial = _trial([_round(4, 4, 4), _round(4, 1, 0), _round(4, 3, 2)], num_tokens=10)
    values = _values([trial])
    assert values["alpha"] == 6 / 8 and values["acceptance_rate"] == 6 / 12
    np.testing.assert_allclose([values[f"alpha_at_depth/d{d}"] for d in (1, 2, 3, 4)], [2 / 3, 1, 0.5, 1])
    survival = [values[f"survival_at_depth/d{d}"] for d in (1, 2, 3, 4)]
    np.testing.assert_allclose(survival, [2 / 3, 2 / 3, 1 / 3, 1 / 3])
    assert values["tau"] == values["tau_uncut"] == values["tau_prompt_mean"] == 3
    np.testing.assert_allclose(values["tau_from_depths"], 1 + sum(survival))
    np.testing.assert_allclose(values["tau_formula"], (1 - 0.75**5) / 0.25)
    assert values["tree_nodes"] == 4
    np.testing.assert_allclose(values["speedup"], 1.5)
    np.testing.assert_allclose(values["draft_cost"], (0.5 / 3) / (2.4 / 9))
    np.testing.assert_allclose(values["verify_cost"], (0.9 / 3) / (2.4 / 9))
    np.testing.assert_allclose(values["loop_overhead"], (2.0 - 0.5 - 0.9 - 0.45) / 1.5)
    np.testing.assert_allclose(values["predicted_speedup"], 3 / (values["verify_cost"] + values["draft_cost"]))
    assert values["plain_tokens_per_s"] == 10 / 3 and values["spec_tokens_per_s"] == 5
    assert accepted_histogram([trial], depth=4) == [1, 0, 1, 0, 1]


def test_what_stands_behind_a_rejection_or_the_end_counts_nowhere():
    """Matches (1, 0, 1) and (1, 1, 1), then a round of which an end-of-text id keeps one of three accepted tokens."""
    trial = _trial([_round(3, 2, 1), _round(3, 3, 3), _round(3, 1, 1, uncut=3)], num_tokens=1 + 2 + 4 + 1)
    values = _values([trial], "chain_k3")
    assert values["acceptance_rate"] == 7 / 9  # of the third round three are accepted, before the end of the text cuts
    assert values["alpha"] == 5 / 6 and values["tau"] == 7 / 3 and values["tau_uncut"] == 1 + 7 / 3
    np.testing.assert_allclose([values[f"alpha_at_depth/d{d}"] for d in (1, 2, 3)], [1, 0.5, 1])
    np.testing.assert_allclose([values[f"survival_at_depth/d{d}"] for d in (1, 2, 3)], [1, 2 / 3, 2 / 3])
    assert accepted_histogram([trial], depth=3) == [0, 1, 0, 2]


def test_the_formula_is_for_chains_in_every_round():
    """Plain steps where positions ran out, or of fallback=auto, are rounds without a chain."""
    for kind in ("fallback_steps", "paused_steps"):
        trial = _trial([_round(4, 4, 4), _round(0, 0, 0)], num_tokens=7)
        setattr(trial.ours, kind, 1)
        values = _values([trial])
        assert "tau_formula" not in values and values["tau"] == 3


def test_measures_of_trees_by_hand():
    """Six nodes at two depths: accepted 2, 1, 0, and 1 at a branch that ends there."""
    rounds = [_round(6, 2, 2, depth=2), _round(6, 2, 1, depth=2), _round(6, 1, 0, depth=2), _round(4, 1, 1, depth=2)]
    trial = _trial(rounds, num_tokens=1 + 3 + 2 + 1 + 2)
    values = _values([trial], "dynamic_d2_k2_n6")
    assert not {"alpha", "tau_formula"} & values.keys()  # several tokens are judged for one place
    assert values["alpha_at_depth/d1"] == 3 / 4
    assert values["alpha_at_depth/d2"] == 1 / 2  # of the two rounds that were offered something at depth 2
    assert [values[f"survival_at_depth/d{d}"] for d in (1, 2)] == [3 / 4, 1 / 4]
    assert values["tau"] == values["tau_uncut"] == 1 + 3 / 4 + 1 / 4
    assert values["tau_from_depths"] == 1 + 3 / 4 + 3 / 4 * 1 / 2  # as if every branch went on
    assert values["tree_nodes"] == 22 / 4
    np.testing.assert_allclose(values["predicted_speedup"], 2 / (values["verify_cost"] + values["draft_cost"]))
    assert {"speedup", "loop_overhead", "repeated_4gram_share", "tau_prompt_mean"} <= values.keys()
    assert accepted_histogram([trial], depth=2) == [1, 2, 1]


def test_without_plain_runs_nothing_is_relative_to_them():
    rounds = [_round(4, 4, 4), _round(4, 1, 0)]
    full, alone = (_values([_trial(rounds, 7, has_plain=has_plain)]) for has_plain in (True, False))
    missing = {"speedup", "predicted_speedup", "draft_cost", "verify_cost", "plain_tokens_per_s"}
    assert alone == {key: value for key, value in full.items() if key not in missing}


def test_a_slow_down_is_said_and_what_is_missing_is_a_dash():
    metrics = {"tau/s/T0/x": Metric(1.5, (1.25, 1.75)), "speedup/s/T0/x": Metric(0.75, (0.5, 1.0))}
    cells = dict(zip(DECODE_COLUMNS, decode_row(metrics, "s/T0/x"), strict=True))
    assert cells["speed-up"] == "0.750 [0.500, 1.000] slower" and cells["tau"] == "1.500 [1.250, 1.750]"
    assert {cells[name] for name in ("alpha", "nodes", "plain tok/s", "spec tok/s", "predicted")} == {"-"}
    faster = decode_row({"speedup/s/T0/x": Metric(1.0)}, "s/T0/x")
    assert faster[DECODE_COLUMNS.index("speed-up")] == "1" and decode_row({}, "x") == ("-",) * 7


def test_ends_of_the_scale():
    always = _trial([_round(4, 4, 4)] * 3, num_tokens=16)
    never = _trial([_round(4, 1, 0)] * 3, num_tokens=4)
    fallback = _trial([_round(0, 0, 0, depth=0)] * 3, num_tokens=4)
    for trial, alpha, tau in ((always, 1.0, 5.0), (never, 0.0, 1.0)):
        values = _values([trial])
        assert values["alpha"] == alpha
        assert values["tau"] == values["tau_formula"] == values["tau_from_depths"] == tau
    values = _values([fallback])
    assert "alpha" not in values and values["tau"] == 1
    mixed = decode_metrics([always, never], shape=TreeShape.parse("chain_k4"), suffix="s")
    assert mixed["tau/s"].ci95 == (1.0, 5.0) and mixed["tau/s"].value == 18 / 6
    assert mixed["tau_prompt_mean/s"].value == 3 and mixed["tau/s"].n == 2


def test_repeated_4grams():
    assert repeated_4gram_share([1, 2, 3]) == 0
    assert repeated_4gram_share(range(20)) == 0
    assert repeated_4gram_share([1, 2, 3, 4] * 3) == 1 - 4 / 9


def test_prompts_of_the_benchmark_sets():
    tokenizer = byte_tokenizer()
    prompts = load_prompts(["mt_bench", "gsm8k", "humaneval"], tokenizer, num_prompts=3)
    assert [p.set_name for p in prompts] == ["mt_bench"] * 3 + ["gsm8k"] * 3 + ["humaneval"] * 3
    text = tokenizer.decode(prompts[0].token_ids)
    assert text == f"<|im_start|>user\n{prompts[0].text}<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids("plain", byte_tokenizer(chat_template=False)) == list(tokenizer("plain")["input_ids"])
    with pytest.raises(UserError, match=r"decode.sets=mtbench.*gsm8k, humaneval, mt_bench"):
        load_prompts(["mtbench"], tokenizer)
    assert prompt_seed(prompts[0], 0) != prompt_seed(prompts[1], 0) != prompt_seed(prompts[1], 1)


def test_a_difference_that_is_no_near_tie_is_a_failure(tiny_target):
    ids = tuple(range(40, 60))
    prompt = Prompt("s", "7", "", ids)
    plain = speculative_decode(tiny_target, None, ids, max_new_tokens=8, eos_token_ids=()).token_ids
    assert first_difference(tiny_target, prompt, plain, plain) is None
    wrong = [*plain[:5], (plain[5] + 1) % 256, *plain[6:]]
    difference = first_difference(tiny_target, prompt, plain, wrong)
    assert difference.index == 5 and difference.is_failure and difference.prompt == "s/7"


def test_texts_may_part_between_any_tokens_that_tie_for_the_best(tiny_target):
    """Three tokens tied: the one that either text took need not be among the two that topk happens to name."""
    prompt = Prompt("s", "7", "", tuple(range(40, 60)))
    with torch.no_grad():
        logits = tiny_target.logits(tiny_target.states(torch.tensor([prompt.token_ids])).final_hidden[0, -1])
    best, *others = logits.topk(4).indices.tolist()
    target = copy.deepcopy(tiny_target)
    with torch.no_grad():
        weight = target.model.get_output_embeddings().weight
        weight[others[:2]] = weight[best].clone()
    for token in others[:2]:
        tie = first_difference(target, prompt, [best], [token])
        assert tie.gap == pytest.approx(0, abs=1e-5) and not tie.is_failure
        assert first_difference(target, prompt, [token], [others[2]]).is_failure


def test_accepted_tokens_are_marked():
    tokenizer = byte_tokenizer()
    ids = tokenizer("a bœuf!")["input_ids"]  # œ is two tokens
    marked = mark_accepted(tokenizer, ids, [False, True, True, True, False, True, True, False])
    assert marked == "a⟦ b⟧œ⟦uf⟧!"
    assert mark_accepted(tokenizer, ids[:2], [False, True]) == "a⟦ ⟧"


def test_what_a_terminal_would_obey_is_not_printed_as_it_is():
    tokenizer = byte_tokenizer()
    prompt = Prompt("gsm8k", "0", "Say \x1b[31m.", [1])
    trial = Trial("gsm8k", "0", None, _result([_round(1, 1, 1)], 3))
    trial.ours.token_ids = tokenizer("a\x1b\r")["input_ids"]
    view = text_view(tokenizer, [prompt], {Method(0.0, "chain_k1", TreeShape.chain(1), "probabilistic"): [trial]})
    for text in view:
        assert "\x1b" not in text and "\r" not in text and "\u241b" in text


def test_a_pair_end_to_end(tmp_path, capsys):
    model = random_model("tiny_llama")
    target = Target(model, byte_tokenizer(), name="tiny")
    pair = Pair(target, first_blocks(model, 7), "pair", "seven_blocks", None, None)
    metrics = decode_pair(pair, DECODE, output_root=tmp_path)
    folder = tmp_path / "pair"
    results = json.loads((folder / "results.json").read_text())
    chains = {"T0/chain_k3", "T1/chain_k3", "T1/chain_k3_greedy_draft"}
    trees = {f"T{t}/{name}" for t in (0, 1) for name in ("static_2x2x1", "dynamic_d3_k2_n5")}
    assert {key.removeprefix("tau/all/") for key in metrics if key.startswith("tau/all/")} == chains | trees
    for where in ("mt_bench", "gsm8k", "all"):
        for method in chains | trees:
            tau = results["metrics"][f"tau/{where}/{method}"]
            assert tau["ci95"][0] <= tau["value"] <= tau["ci95"][1] and tau["n"] == (4 if where == "all" else 2)
            assert (f"alpha/{where}/{method}" in metrics) == (method in chains)
            assert 0 <= metrics[f"alpha_at_depth/d1/{where}/{method}"].value <= 1
            assert metrics[f"speedup/{where}/{method}"].value > 0
    for method in ("chain_k3", "static_2x2x1", "dynamic_d3_k2_n5"):
        assert metrics[f"greedy_differences/all/T0/{method}"].value == 0
        assert metrics[f"tree_nodes/all/T0/{method}"].value <= TreeShape.parse(method).num_nodes
        assert metrics[f"alpha_at_depth/d1/all/T0/{method}"].value > 0.05  # a draft that is sometimes right
    # the first of two children is the chain's own token, so a tree accepts at depth 1 wherever the chain does
    assert metrics["alpha_at_depth/d1/all/T0/static_2x2x1"].value > metrics["alpha_at_depth/d1/all/T0/chain_k3"].value

    counts = json.loads((folder / "decode.json").read_text())
    assert counts["methods"].keys() == chains | trees
    assert counts["settings"] == {**DECODE, "confidence_threshold": None, "draft_len_schedule": "constant"}
    for of_method in counts["methods"].values():
        for name in ("mt_bench", "gsm8k"):
            rounds = sum(len(p["rounds"]) for p in of_method["prompts"] if p["prompt"].startswith(name))
            assert sum(of_method["accepted_histogram"][name]) == rounds
    for method in ("T0/chain_k3", "T0/static_2x2x1", "T0/dynamic_d3_k2_n5"):
        assert counts["greedy_differences"][method] == []
        for prompt in counts["methods"][method]["prompts"]:
            assert prompt["plain"]["token_ids"] == prompt["speculative"]["token_ids"]
    text = (folder / "generations.txt").read_text()
    assert text.startswith("⟦drafted and accepted⟧") and text.count("--- ") == 14
    html = (folder / "generations.html").read_text()
    ElementTree.fromstring(html)
    assert html.count("<details") == 4 * 7 and html.count("<svg") == 4 * 7 * 3 and "seven_blocks for tiny" in html
    assert (folder / "acceptance_by_depth.png").stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "mt_bench/T0/chain_k3" in out and "all/T1/dynamic_d3_k2_n5" in out
    for name in (
        "results.json",
        "decode.json",
        "generations.txt",
        "generations.html",
        "acceptance_by_depth.png",
        "report.html",
    ):
        assert str(folder / name) in out


def test_without_plain_runs_only_tau_is_measured(tiny_target, tmp_path, capsys):
    pair = Pair(tiny_target, first_blocks(tiny_target.model, 7), "pair", "seven_blocks", None, None)
    settings = DECODE | {"sets": ["gsm8k"], "num_prompts": 1, "plain": False, "temperatures": [0.0]}
    metrics = decode_pair(pair, settings, output_root=tmp_path)
    assert "tau/gsm8k/T0/static_2x2x1" in metrics
    assert not [key for key in metrics if key.split("/")[0] in ("speedup", "greedy_differences", "verify_cost")]
    counts = json.loads((tmp_path / "pair" / "decode.json").read_text())
    assert counts["methods"]["T0/chain_k3"]["prompts"][0]["plain"] is None and counts["greedy_differences"] == {}
    assert "decode.plain=false" in capsys.readouterr().out


def test_anothers_results_are_refused_before_anything_is_decoded(tiny_target, tmp_path, monkeypatch):
    pair = Pair(tiny_target, first_blocks(tiny_target.model, 7), "pair", "seven_blocks", None, None)
    other = Pair(tiny_target, first_blocks(tiny_target.model, 6), "pair", "six_blocks", None, None)
    merge_results(tmp_path / "pair" / "results.json", other.header(), {"tau/x/T0/chain_k3": Metric(2.0)})
    monkeypatch.setattr(eval.decode, "decode_trials", lambda *arguments, **options: 1 / 0)
    with pytest.raises(UserError, match="holds results of draft"):
        decode_pair(pair, DECODE, output_root=tmp_path)


def test_trees_on_a_model_with_a_mask_of_its_own_are_refused_before_anything_is_decoded(
    tiny_target, tmp_path, monkeypatch
):
    pair = Pair(tiny_target, first_blocks(tiny_target.model, 7), "pair", "seven_blocks", None, None)
    monkeypatch.setattr(eval.drafters, "has_own_mask", lambda model: model is tiny_target.model)
    monkeypatch.setattr(eval.decode, "decode_trials", lambda *arguments, **options: 1 / 0)
    with pytest.raises(UserError, match=r"^decode\.methods=static_2x2x1: needs full attention"):
        decode_pair(pair, DECODE, output_root=tmp_path)


def test_no_figure_of_an_earlier_call_stays_beside_newer_ones_of_a_method(tiny_target, tmp_path):
    """Measured anew without plain runs, a method has no speed-up; other methods keep theirs."""
    pair = Pair(tiny_target, first_blocks(tiny_target.model, 7), "pair", "seven_blocks", None, None)
    settings = DECODE | {"sets": ["gsm8k"], "num_prompts": 1, "temperatures": [0.0], "max_new_tokens": 4}
    before = decode_pair(pair, settings | {"methods": ["chain_k3", "static_2x2x1"]}, output_root=tmp_path)
    anew = decode_pair(pair, settings | {"methods": ["chain_k3"], "plain": False}, output_root=tmp_path)
    results = json.loads((tmp_path / "pair" / "results.json").read_text())
    kept = {key for key in before if key.endswith("static_2x2x1")}
    assert "speedup/gsm8k/T0/chain_k3" in before and "speedup/gsm8k/T0/static_2x2x1" in kept
    assert results["metrics"].keys() == anew.keys() | kept
    assert [set(merge["keys"]) for merge in results["merges"]] == [kept, set(anew)]


def test_figures_over_all_sets_go_when_one_of_the_sets_is_measured_anew(tiny_target, tmp_path):
    pair = Pair(tiny_target, first_blocks(tiny_target.model, 7), "pair", "seven_blocks", None, None)
    settings = DECODE | {"sets": ["gsm8k", "mt_bench"], "num_prompts": 1, "temperatures": [0.0], "max_new_tokens": 4}
    decode_pair(pair, settings | {"methods": ["chain_k2", "chain_k3"]}, output_root=tmp_path)
    decode_pair(pair, settings | {"sets": ["gsm8k"], "methods": ["chain_k3"]}, output_root=tmp_path)
    metrics = json.loads((tmp_path / "pair" / "results.json").read_text())["metrics"]
    assert {key.split("/")[1] for key in metrics if key.startswith("tau/") and key.endswith("chain_k3")} == {
        "gsm8k", "mt_bench",
    }  # fmt: skip
    assert "tau/all/T0/chain_k2" in metrics


def test_the_clock_waits_for_the_gpu_of_the_model(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    Clock(torch.device("cuda:1")).now()
    Clock(torch.device("cpu")).now()
    assert waited == [torch.device("cuda:1")]


def test_every_method_is_warmed_up_then_interleaved(tiny_target, monkeypatch):
    """Beside every method one plain run a prompt and temperature; the order turns round from prompt to prompt."""
    calls = []

    def record(target, draft, prompt_ids, **options):
        method = "plain" if draft is None else f"{options['method']} {options['draft_sampling']}"
        calls.append((len(prompt_ids), options["temperature"], method, options["max_new_tokens"]))
        return _result([_round(0, 0, 0)], 3)

    monkeypatch.setattr(eval.decode, "speculative_decode", record)
    prompts = [Prompt("s", str(length), "", tuple(range(length))) for length in (10, 11)]
    settings = {"methods": ["chain_k3", "static_2x1"], "temperatures": [0.0, 1.0], "draft_sampling": ["greedy"]}
    trials = eval.decode.decode_trials(tiny_target, tiny_target.model, prompts, **settings)
    at_0 = ["plain", "chain_k3 probabilistic", "static_2x1 probabilistic"]
    at_1 = ["plain", "chain_k3 greedy", "static_2x1 probabilistic"]
    both = [(0.0, method) for method in at_0] + [(1.0, method) for method in at_1]
    turned = [(0.0, method) for method in at_0[::-1]] + [(1.0, method) for method in at_1[::-1]]
    assert calls[:6] == [(10, *run, 8) for run in both]
    assert calls[6:] == [(10, *run, 96) for run in both] + [(11, *run, 96) for run in turned]
    keys = ["T0/chain_k3", "T0/static_2x1", "T1/chain_k3_greedy_draft", "T1/static_2x1"]
    assert [method.key for method in trials] == keys
    assert all([trial.prompt_id for trial in of_method] == ["10", "11"] for of_method in trials.values())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"draft_sampling": ["soft"]}, "decode.draft_sampling=soft"),
        ({"temperatures": 1.0}, "decode.temperatures=1.0"),
        ({"methods": "chain_k3"}, "decode.methods=chain_k3"),
        ({"methods": []}, "decode.methods="),
        ({"methods": ["chain_k3", "tree_k3"]}, "decode.methods=tree_k3"),
        ({"methods": ["chain_k0"]}, "decode.methods=chain_k0"),
        ({"methods": ["chain_k3", "chain_k3"]}, "decode.methods=.*chain_k3 .*twice"),
        ({"max_new_tokens": 0}, "decode.max_new_tokens=0"),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"typical_p": 0.5}, "decode.typical_p"),
        ({"draft_len": 4}, "decode.draft_len.*methods"),
        ({"sets": ["nothing"]}, "decode.sets=nothing"),
    ],
)
def test_bad_settings_are_named(change, named):
    check_decode(DECODE)
    with pytest.raises(UserError, match=named):
        check_decode(DECODE | change)


def test_a_wrong_method_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    arguments = ["target=tiny_random", f"target.converted_root={tmp_path}", f"checkpoint_root={tmp_path}"]
    monkeypatch.setattr(
        sys, "argv", ["decode", *arguments, f"output_root={tmp_path}", "decode.methods=[chain_k3,best]"]
    )
    monkeypatch.setattr(eval.decode, "load_pair", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as caught:
        eval.decode.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: decode.methods=best: ")


def test_the_command_with_trees_and_an_ordinary_draft(tmp_path, monkeypatch):
    model = random_model("tiny_llama")
    first_blocks(model, 7).save_pretrained(tmp_path / "draft")
    byte_tokenizer().save_pretrained(tmp_path / "draft")
    arguments = [
        "target=tiny_random", "dtype=fp32", "draft=hf", f"draft.id={tmp_path / 'draft'}", "decode=trees",
        f"output_root={tmp_path}", "decode.sets=[gsm8k]", "decode.num_prompts=1", "decode.max_new_tokens=16",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["decode", *arguments])
    eval.decode.main()
    folder = tmp_path / "draft-for-tiny_random"
    metrics = json.loads((folder / "results.json").read_text())["metrics"]
    for method in ("chain_k4", "static_3x2x1", "dynamic_d4_k4_n12"):
        for temperature in ("T0", "T1"):
            assert metrics[f"tau/gsm8k/{temperature}/{method}"]["value"] >= 1
        assert metrics[f"greedy_failures/gsm8k/T0/{method}"]["value"] == 0
    for name in ("decode.json", "generations.txt", "generations.html", "acceptance_by_depth.png", "report.html"):
        assert (folder / name).is_file()


def test_filtered_figures_have_keys_of_their_own():
    assert method_name("chain_k4", "probabilistic", 1.0) == "chain_k4"
    assert method_name("chain_k4", "greedy", 1.0, top_k=0, top_p=1.0, min_p=0.0) == "chain_k4_greedy_draft"
    filters = {"top_k": 20, "top_p": 0.9, "min_p": 0.05}
    assert method_name("static_2x1", "probabilistic", 1.0, **filters) == "static_2x1_top_k20_top_p0.9_min_p0.05"
    assert method_name("chain_k4", "greedy", 0.0, top_p=0.9) == "chain_k4"  # filters keep the largest logit


def test_a_tree_has_one_variant_and_a_chain_one_for_each_way_of_drafting():
    kinds = ["greedy", "probabilistic"]
    sampled = methods_at(1.0, ["chain_k2", "static_2x1"], kinds, top_p=0.9)
    assert [method.key for method in sampled] == [
        "T1/chain_k2_greedy_draft_top_p0.9", "T1/chain_k2_top_p0.9", "T1/static_2x1_top_p0.9",
    ]  # fmt: skip
    assert [method.draft_sampling for method in sampled[:2]] == kinds
    assert [m.key for m in methods_at(0.0, ["chain_k2", "static_2x1"], kinds)] == ["T0/chain_k2", "T0/static_2x1"]
    assert [m.name for m in methods_at(0.7, ["static_2x1"], ["greedy"])] == ["static_2x1"]
