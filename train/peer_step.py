"""One training step of the `speculators` library's EAGLE-3 head, on demand: the other side of a speed comparison.

Runs inside the peer's own environment (`make setup-peer`) and imports nothing of ours; `train.measure_eagle` starts it.

1. Read rows from an .npz file; shift, pack and pad them to `--total-length` by the library's own functions.
2. Write one JSON line: {"ready": true, "num_batches": ..., "versions": {...}}.
3. For each line with a batch's number on stdin, run one step and write {"seconds": ..., "loss": ...}.

A step is what their Trainer.train_epoch does once the batch is on the device, in its order: forward with all simulated
steps, loss and metrics, zero_grad, backward, clip_grad_norm_(1.0), AdamW. Attention is sdpa and the loss the eager one,
because their defaults (flex attention, fused loss) are made for a GPU. States of the target are random.
"""

import argparse
import itertools
import json
import os
import sys
import time
from importlib import metadata

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import CollateFn
from torch import Tensor
from transformers import LlamaConfig


def build_model(args: argparse.Namespace) -> Eagle3DraftModel:
    """The head as `speculators train --speculator-type eagle3` builds it by default, with random weights."""
    block = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
    )
    block._attn_implementation = "sdpa"
    proposal = GreedyTokenProposalConfig(speculative_tokens=args.num_steps)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=block,
        draft_vocab_size=args.draft_vocab_size,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=[2, 15, 27],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            default_proposal_method="greedy",
            proposal_methods=[proposal],
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):  # NaN until a target's are loaded
        torch.nn.init.normal_(module.weight, std=0.02)
    model.lm_head.weight.requires_grad_(args.train_lm_head)  # the library itself keeps it frozen
    return model.train()


def load_batches(args: argparse.Namespace, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Batches (1, total_length, ...): each row loses one slot to the shift, -1 in document_ids marks padding.

    The file: input_ids (N,), loss_mask (N,), row_offsets (R+1,), and batch_offsets (B+1,) into the rows. Which rows
    share a batch is settled there by the library's own rule: as many of the next ones as total_length holds.
    """
    arrays = np.load(args.rows)
    collate = CollateFn(args.total_length, args.hidden_size, dtype=dtype, preprocess=shift_batch)
    ids, mask = torch.from_numpy(arrays["input_ids"]).long(), torch.from_numpy(arrays["loss_mask"]).bool()
    rows = []
    for begin, end in itertools.pairwise(arrays["row_offsets"].tolist()):
        length = end - begin
        rows.append(
            {
                "hidden_states": torch.randn(length, 3 * args.hidden_size),
                "input_ids": ids[begin:end],
                "verifier_last_hidden_states": torch.randn(length, args.hidden_size),
                "loss_mask": mask[begin:end],
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
    offsets = arrays["batch_offsets"].tolist()
    batches = [collate(rows[begin:end]) for begin, end in itertools.pairwise(offsets)]
    return [{key: value for key, value in batch.items() if isinstance(value, Tensor)} for batch in batches]


class Step:
    def __init__(self, model: Eagle3DraftModel, args: argparse.Namespace, dtype: torch.dtype):
        self.model, self.num_steps, self.dtype = model, args.num_steps, dtype
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable, lr=args.lr, weight_decay=args.weight_decay)
        self.clip = args.clip
        self.loss_config = resolve_loss_config("kl_div", "eager")

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, float]:
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32):  # master weights stay fp32
            _, loss, _ = self.model(
                **batch, ttt_steps=self.num_steps, ttt_step_loss_decay=1.0, loss_config=self.loss_config
            )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trainable, self.clip)
        self.optimizer.step()
        return {"seconds": time.perf_counter() - start, "loss": loss.item()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    for name in (
        "total-length", "hidden-size", "intermediate-size", "num-heads", "num-kv-heads", "head-dim", "vocab-size",
        "draft-vocab-size", "num-steps", "threads",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("lr", "weight-decay", "clip"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--train-lm-head", action="store_true")
    args = parser.parse_args()

    answers = os.fdopen(os.dup(1), "w")  # for our lines alone: whatever else prints goes to stderr
    os.dup2(2, 1)

    def answer(content: dict) -> None:
        print(json.dumps(content), file=answers, flush=True)

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    step, batches = Step(build_model(args), args, dtype), load_batches(args, dtype)
    versions = {name: metadata.version(name) for name in ("speculators", "torch", "transformers")}
    answer({"ready": True, "num_batches": len(batches), "versions": versions})
    for line in sys.stdin:
        answer(step(batches[int(line)]))


if __name__ == "__main__":
    main()
