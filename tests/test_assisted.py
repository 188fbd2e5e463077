"""The exported draft as `assistant_model` of transformers' generate, also for a target whose head is padded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.drafts import gpt2_draft
from models.export import export
from models.target import Target
from models.tiny import byte_tokenizer, random_model

DRAFT_LEN = 4
PROMPT = "The capital of France"


def padded_target(shape: str, width: int) -> Target:
    """Rows beyond the tokenizer's 259 ids are zero, as padding usually is."""
    model = random_model(shape)
    num_ids = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(width, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[num_ids:] = 0
    model.generation_config.eos_token_id = None
    return Target(model, byte_tokenizer(), name=shape)


def exported(draft: PreTrainedModel, target: Target, folder: Path) -> PreTrainedModel:
    """As a user of transformers has it: written by the exporter, loaded by nothing of ours."""
    export(draft, target, folder, to="hf", draft_len=DRAFT_LEN)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@contextmanager
def counted_calls(model: nn.Module) -> Iterator[list[int]]:
    """Widths of the model's forwards while it is open."""
    calls: list[int] = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        calls.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def generate(target: Target, assistant: PreTrainedModel | None, length: int, **options: object) -> list[int]:
    inputs = target.tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        output = target.model.generate(
            **inputs,
            assistant_model=assistant,
            max_new_tokens=length,
            pad_token_id=0,
            **{"do_sample": False, **options},
        )
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("width", [259, 320], ids=["equal widths", "padded target"])
@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
def test_greedy_text_is_the_targets_own(shape: str, width: int, tmp_path: Path) -> None:
    target = padded_target(shape, width)
    draft = exported(gpt2_draft(target.vocab_size, n_layer=1, n_head=2, n_embd=32, n_positions=128), target, tmp_path)
    assert draft.config.vocab_size == target.model.config.vocab_size == width
    assert generate(target, draft, 24) == generate(target, None, 24)


def test_a_draft_that_is_the_target_is_always_accepted(tmp_path: Path) -> None:
    """draft_len tokens and the target's own a forward, in a second call as in the first: no heuristic of transformers
    changes the number, and no padded id takes the place of a real one."""
    target = padded_target("tiny_gpt2", 320)
    draft = exported(random_model("tiny_gpt2"), target, tmp_path)
    plain = generate(target, None, 30)
    for _ in range(2):
        with counted_calls(target.model) as calls:
            assert generate(target, draft, 30) == plain
        assert calls[1:] == [DRAFT_LEN + 1] * 5, calls  # the first reads the prompt as well; 6 x 5 tokens


def test_padded_ids_get_no_mass(tmp_path: Path) -> None:
    """Sampled drafting draws from the exported draft's whole softmax."""
    target = padded_target("tiny_llama", 320)
    draft = gpt2_draft(target.vocab_size, n_layer=1, n_head=2, n_embd=32, n_positions=128)
    nn.init.normal_(draft.transformer.ln_f.bias)  # as after training: it begins at zero
    draft = exported(draft, target, tmp_path)
    with torch.inference_mode():
        probs = draft(**target.tokenizer(PROMPT, return_tensors="pt")).logits.softmax(-1)  # (1, T, 320)
    assert probs[..., target.vocab_size :].sum(-1).max() < 1e-6


@pytest.mark.slow
def test_the_30m_draft_assists_the_embedded_target(smollm2: Target, tmp_path: Path) -> None:
    draft = exported(gpt2_draft(smollm2.vocab_size, eos_token_ids=smollm2.eos_token_ids), smollm2, tmp_path)
    with counted_calls(smollm2.model) as calls:
        assisted = generate(smollm2, draft, 16)
    assert assisted == generate(smollm2, None, 16)
    assert max(calls[1:]) == DRAFT_LEN + 1
