"""Evaluations of a bare target: draft=none decodes by the methods that need no draft; all else says what it lacks."""

import json
import re
import sys

import pytest
import torch

import eval.alpha
import eval.decode
import train.distill
import train.serve_check
from eval.decode import decode_trials
from eval.loop import speculative_decode
from eval.prompts import load_prompts
from models.target import Target
from models.tiny import byte_tokenizer, random_model
from tests.test_loop import first_blocks

METHODS = ["ngram_n3_k5", "lookahead_w5_n3_g5"]


def call(main, arguments, tmp_path, monkeypatch):
    shared = ["target=tiny_random", "dtype=fp32", f"target.converted_root={tmp_path}", f"output_root={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["job", *shared, f"checkpoint_root={tmp_path}", *arguments])
    main()


def test_the_command_decodes_without_a_draft(tmp_path, monkeypatch, capsys):
    few = ["decode.sets=[gsm8k]", "decode.num_prompts=2", "decode.max_new_tokens=32"]
    call(eval.decode.main, ["draft=none", f"decode.methods=[{','.join(METHODS)}]", *few], tmp_path, monkeypatch)
    folder = tmp_path / "none-for-tiny_random"
    results = json.loads((folder / "results.json").read_text())
    assert results["draft"] == {"name": "no draft"}
    for method in METHODS:
        for temperature in ("T0", "T1"):
            assert results["metrics"][f"tau/gsm8k/{temperature}/{method}"]["value"] >= 1
            assert results["metrics"][f"speedup/gsm8k/{temperature}/{method}"]["value"] > 0
        assert results["metrics"][f"greedy_failures/gsm8k/T0/{method}"]["value"] == 0
        assert results["metrics"][f"tau/gsm8k/T0/{method}"]["value"] > 1  # a tiny model repeats itself
    assert "alpha/gsm8k/T0/ngram_n3_k5" in results["metrics"]
    assert "tau_formula/gsm8k/T0/ngram_n3_k5" not in results["metrics"]  # its chains are not all of 5 tokens
    assert (folder / "report.html").is_file()
    assert "Decoding with no draft for tiny_random" in capsys.readouterr().out


def test_beside_methods_of_a_draft_the_same_texts_and_counts():
    model = random_model("tiny_llama")
    target = Target(model, byte_tokenizer(), name="tiny")
    prompts = load_prompts(["gsm8k"], target.tokenizer, num_prompts=1)
    options = {"temperatures": [0.0, 1.0], "max_new_tokens": 24, "plain": False}
    alone = decode_trials(target, None, prompts, methods=METHODS, **options)
    beside = decode_trials(target, first_blocks(model, 7), prompts, methods=["chain_k3", *METHODS], **options)
    assert len(alone) == 4 and len(beside) == 6
    for method, [trial] in alone.items():
        assert trial.ours.token_ids == beside[method][0].ours.token_ids
        assert trial.ours.rounds == beside[method][0].ours.rounds


@pytest.mark.parametrize(
    ("main", "arguments", "told"),
    [
        (eval.decode.main, ["decode.methods=[ngram_n3_k5,chain_k4]"], "decode.methods=.*: chain_k4 needs a draft"),
        (eval.alpha.main, [], "draft=none: acceptance on held-out text needs a draft; give run=NAME"),
        (train.distill.main, [], "draft=none: nothing to train; use draft=gpt2_30m"),
        (train.serve_check.main, [], "draft=none: the serving check needs a draft"),
    ],
)
def test_what_needs_a_draft_says_so_in_one_line(main, arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.serve_check, "check_installed", lambda: None)
    monkeypatch.setattr(train.serve_check.signal, "signal", lambda *_: None)  # the test's process keeps its own
    with pytest.raises(SystemExit) as caught:
        call(main, ["draft=none", *arguments], tmp_path, monkeypatch)
    [line] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert caught.value.code == 2 and re.match(f"error: {told}", line)


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("method", ["ngram_n3_k5", "ngram_n1_k2", "lookahead_w5_n3_g5", "lookahead_w3_n5_g2"])
def test_greedy_texts_are_those_of_plain_decoding_up_to_the_last_position(model, method):
    """Near the limit the places of lookahead's window lie beyond it."""
    target = random_model(model)
    limit = target.config.max_position_embeddings
    accepted = 0
    for length in (12, limit - 30):
        prompt = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        options = {"max_new_tokens": 60, "eos_token_ids": ()}
        plain = speculative_decode(target, None, prompt, **options)
        ours = speculative_decode(target, None, prompt, method=method, **options)
        assert ours.token_ids == plain.token_ids and ours.finish_reason == plain.finish_reason
        accepted += sum(round.accepted for round in ours.rounds)
        assert plain.finish_reason == ("positions" if length > 12 else "length")
    assert accepted > 10
