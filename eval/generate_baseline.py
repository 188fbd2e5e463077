"""Hugging Face's `generate` on the same target, as its user runs it: plain, with an assistant model, by prompt lookup.

Same weights, dtype, prompt ids, token budget, end-of-text ids and temperature as in our loop; the model has no layer of
ours and no generation defaults of its own. Candidates are read from the target's forwards, emitted blocks from a
streamer. The first forward of assisted generation reads the prompt *and* drafted tokens, so that each one is a round.
"""

import copy
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eval.loop import DecodeResult, Round
from eval.tree import TreeShape
from models.export import fit_width, set_assistant_defaults
from models.packed_linear import unpack_linears
from models.sampling import SamplingParams
from models.target import Target


def plain_model(target: Target) -> PreTrainedModel:
    """The target as transformers loads it. It shares the weights, so it costs no memory."""
    model = unpack_linears(_sharing_copy(target.model))
    ends = list(target.eos_token_ids)
    # those of a model card (repetition penalty, top-k, ...) would decode another distribution than our loop does
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0] if ends else 0)
    return model


def assistant_for(draft: PreTrainedModel, target: Target, draft_len: int) -> PreTrainedModel:
    """The draft as the exporter gives it to transformers: the target's width, `draft_len` tokens every round."""
    if draft.get_output_embeddings().weight.shape[0] == target.head_width:
        assistant = unpack_linears(_sharing_copy(draft))
    else:
        assistant = unpack_linears(copy.deepcopy(draft))
        fit_width(assistant, width=target.head_width, num_ids=target.vocab_size)
    set_assistant_defaults(assistant, draft_len)
    return assistant


def generate_text(
    model: PreTrainedModel,  # a plain_model
    prompt_ids: Sequence[int],
    *,
    params: SamplingParams,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    seed: int = 0,
    assistant: PreTrainedModel | None = None,
    lookup: TreeShape | None = None,  # ngram_n3_k5: prompt lookup with n-grams of up to 3 tokens, 5 drafted
) -> DecodeResult:
    """One text with the counts of our loop. Of the times only `wall_s` is known; `accepted_uncut` is `accepted`."""
    assert not (assistant and lookup)
    input_ids = torch.tensor([list(prompt_ids)], device=model.device)  # (1, T)
    options = {"max_new_tokens": max_new_tokens, "do_sample": not params.is_greedy}
    if not params.is_greedy:
        options |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        options |= {"min_p": params.min_p} if params.min_p else {}
    if assistant is not None:
        options["assistant_model"] = assistant
    if lookup is not None:
        options |= {"prompt_lookup_num_tokens": lookup.depth, "max_matching_ngram_size": lookup.ngram}
    is_assisted = assistant is not None or lookup is not None
    rounds = RoundCounter(model, len(prompt_ids)) if is_assisted else None
    device = model.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        begin = _now(device)
        try:
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                eos_token_id=list(eos_token_ids) or None,
                streamer=rounds,
                **options,
            )
        finally:
            if rounds:
                rounds.close()
        seconds = _now(device) - begin
    token_ids = output[0, len(prompt_ids) :].tolist()
    result = DecodeResult(
        token_ids,
        [0] * len(token_ids),
        "eos" if token_ids[-1] in eos_token_ids else "length",
        rounds.rounds() if rounds else [Round(0, 0, 0, 0)] * (len(token_ids) - 1),
        wall_s=seconds,
    )
    if rounds:
        result.token_depth = [depth for block in rounds.depths() for depth in block]
        assert [t for block in rounds.emitted for t in block] == token_ids
    return result


class RoundCounter(BaseStreamer):
    """Of every round of assisted generation what the target read beyond the text, and what was emitted."""

    def __init__(self, model: nn.Module, prompt_length: int):
        self.prompt_length = prompt_length
        self.candidates: list[list[int]] = []
        self.emitted: list[list[int]] = []
        self._is_prompt = True
        self._handle = model.register_forward_pre_hook(self._read, with_kwargs=True)

    def _read(self, module: nn.Module, args: tuple, kwargs: dict[str, Tensor]) -> None:
        read = kwargs["input_ids"][0].tolist()
        self.candidates.append(read[1:] if self.candidates else read[self.prompt_length :])

    def put(self, value: Tensor) -> None:
        if not self._is_prompt:
            self.emitted.append(value.reshape(-1).tolist())
        self._is_prompt = False

    def end(self) -> None:
        pass

    def close(self) -> None:
        self._handle.remove()

    def _accepted(self) -> list[int]:
        # neither rule can put the rejected token in its own place: a common beginning is what was accepted
        pairs = zip(self.candidates, self.emitted, strict=True)
        return [
            next((i for i, (a, b) in enumerate(zip(drafted, block)) if a != b), min(len(drafted), len(block)))
            for drafted, block in pairs
        ]

    def rounds(self) -> list[Round]:
        found = []
        for drafted, block, accepted in zip(self.candidates, self.emitted, self._accepted()):
            is_rejected = accepted < min(len(drafted), len(block))
            found.append(Round(len(drafted), accepted + is_rejected, accepted, accepted, len(drafted)))
        return found

    def depths(self) -> list[list[int]]:
        """As DecodeResult.token_depth, by rounds."""
        return [
            [*range(1, accepted + 1), *[0] * (len(block) - accepted)]
            for block, accepted in zip(self.emitted, self._accepted())
        ]


def _sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Modules and config of its own, the same tensors."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
