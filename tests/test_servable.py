"""Which engine serves what: told by one line, at the start of training and by the exporter."""

import pytest
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from models.servable import EAGLE_FAMILIES, ENGINES, servable, unservable_lines
from train.distill import say_unservable

LLAMA, GPT2 = LlamaConfig(num_hidden_layers=8), GPT2Config()


class UnknownConfig(PreTrainedConfig):
    model_type = "brandnew"
    num_hidden_layers = 8


@pytest.mark.parametrize("engine", EAGLE_FAMILIES)
@pytest.mark.parametrize("target", [LLAMA, Qwen3Config(num_hidden_layers=8)], ids=["llama", "qwen3"])
def test_eagle3_is_served_for_common_families(engine, target):
    assert servable(target, "eagle3", engine) is None


@pytest.mark.parametrize("engine", EAGLE_FAMILIES)
@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_no_engine_serves_a_head_for_gpt2(engine, kind):
    reason = servable(GPT2, kind, engine)
    assert ENGINES[engine] in reason and ("gpt2" in reason or "EAGLE-3 heads only" in reason)
    assert "\n" not in reason


def test_a_draft_model_is_served_for_gpt2_too_but_not_by_tensorrt():
    assert [servable(GPT2, "draft_model", engine, draft_config=GPT2) for engine in ("vllm", "sglang", "hf")] == [
        None
    ] * 3
    assert servable(LLAMA, "draft_model", "trtllm", draft_config=LLAMA) is None
    assert "no gpt2 model, which the target is" in servable(GPT2, "draft_model", "trtllm", draft_config=LLAMA)
    assert "no gpt2 model, which the draft is" in servable(LLAMA, "draft_model", "trtllm", draft_config=GPT2)


@pytest.mark.parametrize(
    ("kind", "engine", "told"),
    [
        ("eagle1", "trtllm", "EAGLE-3 heads only"),
        ("eagle1", "speculators", "EAGLE-3 heads only"),
        ("eagle3", "hf", "no class for eagle3 heads"),
        ("draft_model", "speculators", "an ordinary folder"),
    ],
)
def test_kinds_that_an_engine_does_not_know(kind, engine, told):
    assert told in servable(LLAMA, kind, engine)
    assert told in servable(LLAMA, kind, engine, any_family=True)


def test_tensorrt_needs_six_layers():
    assert servable(LlamaConfig(num_hidden_layers=6), "eagle3", "trtllm") is None
    assert "6 layers" in servable(LlamaConfig(num_hidden_layers=5), "eagle3", "trtllm")


def test_a_family_that_is_not_listed_is_let_through_on_demand():
    assert "brandnew" in servable(UnknownConfig(), "eagle3", "vllm")
    assert "vLLM, which serves speculators folders" in servable(UnknownConfig(), "eagle3", "speculators")
    for engine in (*EAGLE_FAMILIES, "speculators"):
        assert servable(UnknownConfig(), "eagle3", engine, any_family=True) is None


def test_training_begins_with_a_warning(tiny_target, tiny_gpt2_target, capsys):
    say_unservable(tiny_target, "eagle3")
    assert capsys.readouterr().out == ""
    say_unservable(tiny_gpt2_target, "eagle3")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["warning"] * 3
    assert all(name in line for name, line in zip(("vLLM", "SGLang", "TensorRT-LLM"), lines))
    say_unservable(tiny_target, "eagle3", tap_ids=(0, 3, 5))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("everywhere: ")[1].split(" cannot")[0] for line in lines] == ["SGLang", "TensorRT-LLM"]
    say_unservable(tiny_target, "eagle3", tap_ids=(3, 5))
    assert capsys.readouterr().out.count("reads three taps and this head 2") == 3
    say_unservable(tiny_target, "draft_model", tiny_gpt2_target.config)
    assert (
        capsys.readouterr().out.count("warning: ")
        == 1
        == len(unservable_lines(tiny_target.config, "draft_model", draft_config=tiny_gpt2_target.config))
    )
