"""Measures by hand, prompts, near ties, the text view, and the entry point's files."""

import json

import numpy as np
import pytest

from eval.decode import decode_pair, first_difference, method_name, prompt_seed
from eval.loop import DecodeResult, Round, speculative_decode
from eval.measures import Trial, accepted_histogram, decode_metrics, repeated_4gram_share
from eval.prompts import Prompt, load_prompts, prompt_ids
from eval.run import Pair
from eval.text_view import mark_accepted
from models.errors import UserError
from models.target import Target
from models.tiny import byte_tokenizer, random_model
from tests.test_loop import first_blocks

DECODE = {
    "sets": ["mt_bench", "gsm8k"], "num_prompts": 2, "max_new_tokens": 12, "draft_len": 3, "temperatures": [0.0, 1.0],
    "draft_sampling": ["probabilistic", "greedy"], "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0,
}  # fmt: skip


def _trial(rounds, num_tokens, prompt_id="0"):
    ours = DecodeResult(
        list(range(num_tokens)), [False] * num_tokens, "length", rounds, wall_s=2.0, prefill_s=0.5, target_s=0.9,
        draft_s=0.5, draft_forward_s=0.45,
    )  # fmt: skip
    plain = DecodeResult(
        list(range(num_tokens)), [False] * num_tokens, "length", [Round(0, 0, 0, 0)] * (num_tokens - 1), wall_s=3.0,
        target_s=2.4,
    )  # fmt: skip
    return Trial("s", prompt_id, plain, ours)


def test_every_measure_by_hand():
    """K = 4, accepted 4, 0, 2: no name means two things."""
    trial = _trial([Round(4, 4, 4, 4), Round(4, 1, 0, 0), Round(4, 3, 2, 2)], num_tokens=10)
    values = {k: m.value for k, m in decode_metrics([trial], draft_len=4, suffix="s").items()}
    assert values["alpha/s"] == 6 / 8
    depths = [values[f"alpha_at_depth/d{d}/s"] for d in (1, 2, 3, 4)]
    np.testing.assert_allclose(depths, [2 / 3, 1, 0.5, 1])
    assert values["tau/s"] == values["tau_uncut/s"] == values["tau_prompt_mean/s"] == 3
    np.testing.assert_allclose(values["tau_from_depths/s"], 1 + 2 / 3 + 2 / 3 + 1 / 3 + 1 / 3)
    np.testing.assert_allclose(values["tau_formula/s"], (1 - 0.75**5) / 0.25)
    np.testing.assert_allclose(values["speedup/s"], 1.5)
    np.testing.assert_allclose(values["draft_cost/s"], (0.5 / 3) / (2.4 / 9))
    np.testing.assert_allclose(values["verify_cost/s"], (0.9 / 3) / (2.4 / 9))
    np.testing.assert_allclose(values["loop_overhead/s"], (2.0 - 0.5 - 0.9 - 0.45) / 1.5)
    np.testing.assert_allclose(values["predicted_speedup/s"], values["tau_formula/s"] / (1 + values["draft_cost/s"]))
    assert values["plain_tokens_per_s/s"] == 10 / 3 and values["spec_tokens_per_s/s"] == 5
    assert accepted_histogram([trial], draft_len=4) == [1, 0, 1, 0, 1]


def test_ends_of_the_scale():
    always = _trial([Round(4, 4, 4, 4)] * 3, num_tokens=16)
    never = _trial([Round(4, 1, 0, 0)] * 3, num_tokens=4)
    fallback = _trial([Round(0, 0, 0, 0)] * 3, num_tokens=4)
    for trial, alpha, tau in ((always, 1.0, 5.0), (never, 0.0, 1.0)):
        values = {k: m.value for k, m in decode_metrics([trial], draft_len=4, suffix="s").items()}
        assert values["alpha/s"] == alpha
        assert values["tau/s"] == values["tau_formula/s"] == values["tau_from_depths/s"] == tau
    values = decode_metrics([fallback], draft_len=4, suffix="s")
    assert "alpha/s" not in values and values["tau/s"].value == 1
    mixed = decode_metrics([always, never], draft_len=4, suffix="s")
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


def test_accepted_tokens_are_marked():
    tokenizer = byte_tokenizer()
    ids = tokenizer("a bœuf!")["input_ids"]  # œ is two tokens
    marked = mark_accepted(tokenizer, ids, [False, True, True, True, False, True, True, False])
    assert marked == "a⟦ b⟧œ⟦uf⟧!"
    assert mark_accepted(tokenizer, ids[:2], [False, True]) == "a⟦ ⟧"


def test_a_pair_end_to_end(tmp_path, capsys):
    model = random_model("tiny_llama")
    target = Target(model, byte_tokenizer(), name="tiny")
    pair = Pair(target, first_blocks(model, 7), "pair", "seven_blocks", None, None)
    metrics = decode_pair(pair, DECODE, output_root=tmp_path)
    results = json.loads((tmp_path / "pair" / "results.json").read_text())
    for where in ("mt_bench", "gsm8k", "all"):
        for method in ("T0/chain_k3", "T1/chain_k3", "T1/chain_k3_greedy_draft"):
            tau = results["metrics"][f"tau/{where}/{method}"]
            assert tau["ci95"][0] <= tau["value"] <= tau["ci95"][1] and tau["n"] == (4 if where == "all" else 2)
            assert 0 <= metrics[f"alpha/{where}/{method}"].value <= 1
    assert "tau/all/T0/chain_k3_greedy_draft" not in metrics
    assert metrics["greedy_differences/all/T0/chain_k3"].value == 0
    counts = json.loads((tmp_path / "pair" / "decode.json").read_text())
    greedy = counts["methods"]["T0/chain_k3"]
    rounds = sum(len(p["rounds"]) for p in greedy["prompts"] if p["prompt"].startswith("gsm8k"))
    assert sum(greedy["accepted_histogram"]["gsm8k"]) == rounds
    assert counts["settings"]["draft_len"] == 3 and counts["settings"]["draft_len_schedule"] == "constant"
    for prompt in greedy["prompts"]:
        assert prompt["plain"]["token_ids"] == prompt["speculative"]["token_ids"]
    text = (tmp_path / "pair" / "generations.txt").read_text()
    assert text.startswith("⟦drafted and accepted⟧") and text.count("--- ") == 6
    out = capsys.readouterr().out
    assert "mt_bench/T0/chain_k3" in out and str(tmp_path / "pair" / "results.json") in out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"draft_sampling": ["soft"]}, "decode.draft_sampling=soft"),
        ({"temperatures": 1.0}, "decode.temperatures=1.0"),
        ({"draft_len": 0}, "decode.draft_len=0"),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"typical_p": 0.5}, "decode.typical_p"),
        ({"sets": ["nothing"]}, "decode.sets=nothing"),
    ],
)
def test_bad_settings_are_named(tiny_target, tmp_path, change, named):
    pair = Pair(tiny_target, tiny_target.model, "pair", "same", None, None)
    with pytest.raises(UserError, match=named):
        decode_pair(pair, DECODE | change, output_root=tmp_path)


def test_filtered_figures_have_keys_of_their_own():
    assert method_name(4, "probabilistic", 1.0) == "chain_k4"
    assert method_name(4, "greedy", 1.0, top_k=0, top_p=1.0, min_p=0.0) == "chain_k4_greedy_draft"
    assert (
        method_name(4, "probabilistic", 1.0, top_k=20, top_p=0.9, min_p=0.05) == "chain_k4_top_k20_top_p0.9_min_p0.05"
    )
    assert method_name(4, "greedy", 0.0, top_p=0.9) == "chain_k4"  # filters keep the largest logit
