"""Drafts that are over-fitted to a few of the target's own greedy answers: nearly all that they draft is accepted, so a
mistake in an export, or in the way an engine reads it, shows in the counters at once.

1. Decode candidate prompts plainly; keep the answers in which the target is farthest from a tie.
2. Write them as a chat file, and train a draft of each kind on it by the usual job (train.distill).
What is there already is used again; overwrite=true begins anew.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from hydra import compose
from omegaconf import DictConfig

from data.masks import chat_row
from data.signals import SignalSpec
from eval.loop import speculative_decode
from eval.prompts import Prompt, load_prompts
from eval.results import write_atomic
from models.eagle import build_eagle
from models.errors import UserError
from models.target import Target
from train.cache import rows_of
from train.distill import distill, some_taps

SETS = ("mt_bench", "gsm8k", "humaneval")
NUM_CANDIDATES, NUM_ANSWERS, MAX_NEW_TOKENS = 8, 4, 48  # candidates of each set; answers in all
DRAFT_VOCAB_SIZE = 8192
SHARED = [
    "data.held_out_fraction=0.0", "data.max_length=1024", "trainer.max_epochs=100000", "trainer.batch_tokens=1024",
    "trainer.log_every_steps=20", "trainer.checkpoint_every_minutes=60", "alpha.temperatures=[0.0,1.0]",
]  # fmt: skip
KINDS = {  # overrides of train.distill
    "eagle3": ["draft=eagle3", "draft.simulation.steps=3", "optim=muon", "trainer.max_steps=45"],
    "eagle1": ["draft=eagle1", "optim=muon", "trainer.max_steps=150"],
    "medusa": ["draft=medusa", "draft.num_heads=3", "optim=muon", "trainer.max_steps=150"],
    "gpt2": ["draft=gpt2_30m", "draft.n_layer=2", "trainer.max_steps=120"],
}


@dataclass(frozen=True)
class Answer:
    prompt: Prompt
    token_ids: list[int]
    gap: float  # between the target's two best logits, the smallest along the answer


def own_answers(target: Target, folder: Path, *, overwrite: bool = False) -> list[Answer]:
    """Greedy answers to train on, those with the widest `gap` first; kept in answers.json and, as chats, chats.jsonl.
    Answers kept under other settings, or of another target, are decoded anew.

    An answer whose text does not give back its ids is left out. Raises UserError where too few are left.
    """
    candidates = load_prompts(SETS, target.tokenizer, num_prompts=NUM_CANDIDATES)
    path = folder / "answers.json"
    settings = {"candidates": NUM_CANDIDATES, "answers": NUM_ANSWERS, "max_new_tokens": MAX_NEW_TOKENS}
    settings |= {"target": target.fingerprint()}
    if path.is_file() and not overwrite:
        found = json.loads(path.read_text())
        if isinstance(found, dict) and found["settings"] == settings:
            prompts = {(p.set_name, p.prompt_id): p for p in candidates}
            return [Answer(prompts[e["set"], e["id"]], e["token_ids"], e["gap"]) for e in found["answers"]]
    answers, chats = [], {}
    for prompt in candidates:
        if len(prompt.token_ids) + MAX_NEW_TOKENS > target.max_positions:
            continue
        result = speculative_decode(target, None, prompt.token_ids, max_new_tokens=MAX_NEW_TOKENS)
        chat = _chat(target, prompt, result.token_ids, result.finish_reason)
        if chat is not None:
            answer = Answer(prompt, result.token_ids, narrowest_gap(target, prompt, result.token_ids))
            answers.append(answer)
            chats[id(answer)] = chat
    answers = sorted(answers, key=lambda answer: -answer.gap)[:NUM_ANSWERS]
    if len(answers) < NUM_ANSWERS:
        raise UserError(
            f"target={target.name}: only {len(answers)} of its answers can be trained on; take an instruct target"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "chats.jsonl", "".join(json.dumps(chats[id(answer)]) + "\n" for answer in answers))
    kept = [
        {"set": a.prompt.set_name, "id": a.prompt.prompt_id, "token_ids": a.token_ids, "gap": a.gap} for a in answers
    ]
    write_atomic(path, json.dumps({"settings": settings, "answers": kept}) + "\n")
    return answers


def _chat(target: Target, prompt: Prompt, token_ids: list[int], finish_reason: str) -> dict | None:
    """The row of a chat file. None where it would not be read as these very ids."""
    ended = finish_reason == "eos"
    text = target.tokenizer.decode(token_ids[:-1] if ended else token_ids, clean_up_tokenization_spaces=False)
    messages = [{"role": "user", "content": prompt.text}, {"role": "assistant", "content": text}]
    reason = "stop" if ended else "length"
    try:
        input_ids, _ = chat_row(messages, target.tokenizer, reason)
    except UserError:
        return None
    ids = [*prompt.token_ids, *token_ids]
    return {"messages": messages, "finish_reason": reason} if input_ids[: len(ids)].tolist() == ids else None


@torch.inference_mode()
def narrowest_gap(target: Target, prompt: Prompt, token_ids: Sequence[int]) -> float:
    """How near to a tie the target comes while it writes this: best logit minus second, at the narrowest place."""
    ids = torch.tensor([[*prompt.token_ids, *token_ids[:-1]]], device=target.device)
    hidden = target.states(ids).final_hidden[0, len(prompt.token_ids) - 1 :]
    best = target.logits(hidden).float().topk(2).values  # (T, 2)
    return float((best[:, 0] - best[:, 1]).min())


def over_fitted(
    kind: str, target: Target, answers: Sequence[Answer], folder: Path, overrides: Sequence[str], *, overwrite: bool
) -> Path:
    """The run of a draft of this kind, trained on `folder`/chats.jsonl; its folder.

    overrides: those of the command line that say what the target is.
    """
    chats = folder / "chats.jsonl"
    sources = ",".join(f"{{path: {chats}, kind: chat, use: {split}}}" for split in ("train", "held_out"))
    places = [f"{name}_root={folder / name}" for name in ("checkpoint", "output", "cache")]
    steps = next(o for o in KINDS[kind] if o.startswith("trainer.max_steps")).split("=")[1]
    options = [f"run={kind}", f"data.sources=[{sources}]", f"trainer.val_every_steps={steps}", f"overwrite={overwrite}"]
    cfg = compose("distill", overrides=[*SHARED, *KINDS[kind], *overrides, *places, *options])
    if kind in ("eagle3", "medusa"):
        cfg.draft.draft_vocab_size = min(DRAFT_VOCAB_SIZE, target.vocab_size // 2)
    if kind == "eagle3":
        cfg.draft.init = str(folder / "scattered")
        if overwrite or not (folder / "scattered" / "config.json").is_file():
            scattered_head(target, answers, cfg, folder / "scattered")
    return distill(cfg)


def scattered_head(target: Target, answers: Sequence[Answer], cfg: DictConfig, folder: Path) -> None:
    """An untrained EAGLE-3 head whose draft vocabulary lies all over the target's ids, the answers' among them.

    The most frequent ids of a real run are mostly the lowest ones, for which a wrong d2t often does no harm.
    """
    needed = sorted({token for answer in answers for token in answer.token_ids})
    others = np.setdiff1d(np.arange(target.vocab_size), needed)
    size = cfg.draft.draft_vocab_size
    drawn = np.random.default_rng(0).choice(others, size - len(needed), replace=False)
    ids = torch.from_numpy(np.sort(np.concatenate([needed, drawn])).astype(np.int64))
    head = build_eagle(target=target, draft_vocab_size=size, draft_vocab=ids)
    spec = SignalSpec("hidden", cfg.cache.top_k, target.tap_ids)
    head.set_tap_scale(some_taps(target, rows_of(cfg, target, "train"), spec), keep_function=False)
    head.save_pretrained(folder)
