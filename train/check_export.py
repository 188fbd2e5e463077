"""Check a head's folder: `python -m train.check_export folder=FOLDER [to=vllm] [target=hf target.source=...]`.

1. read it as the engines do (models/check_export.py); a line a problem, exit code 2 where there is one
2. with a target on the command line: its widths, its embedding, and which taps the head was trained on, measured: the
   expected acceptance on the target's own answers with the taps as written, and with all of them one block off
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from eval.alpha import token_alpha
from eval.entry import entry
from eval.prompts import Prompt, load_prompts
from eval.stats import Interval, ratio_ci
from models.check_export import check_folder
from models.eagle import EagleHead
from models.errors import UserError
from models.generation import Request, generate_rows
from models.import_head import read_head
from models.sampling import SamplingParams
from models.target import Target

Row = tuple[list[int], int]  # ids of a prompt with its answer, number of those of the prompt


@dataclass(frozen=True)
class Shift:
    """Acceptance with the taps `by` blocks off: per row, alpha summed over its tokens, and their number."""

    by: int
    sums: np.ndarray  # (R,)
    counts: np.ndarray  # (R,)

    @property
    def alpha(self) -> Interval:
        return ratio_ci(self.sums, self.counts)

    def gain(self, as_written: "Shift") -> Interval:
        """How much more is accepted than with the taps as written, with its interval over the same rows."""
        return ratio_ci(self.sums - as_written.sums, self.counts)


def check(cfg: DictConfig, *, with_target: bool) -> list[str]:
    """The problems of `cfg.folder`; what was measured is printed. Raises UserError where there is no such target."""
    if cfg.folder is None:
        raise UserError("folder: not given; that of a head, for example folder=exports/my_head")
    if not with_target:
        return check_folder(cfg.folder, to=cfg.to)
    target: Target = instantiate(cfg.target, tap_ids=None)
    tap_ids = cfg.target.tap_ids
    problems = check_folder(
        cfg.folder,
        to=cfg.to,
        target_embedding=target.embedding,
        target_config=target.config,
        tap_ids=None if tap_ids in (None, "default") else list(tap_ids),
    )
    try:
        head = read_head(cfg.folder, target)
    except UserError as error:
        return problems or [str(error)]
    prompts = load_prompts(cfg.decode.sets, target.tokenizer, num_prompts=cfg.decode.num_prompts)
    rows = answers(target, prompts, max_new_tokens=cfg.decode.max_new_tokens)
    shifts = acceptance_by_shift(target, head, rows)
    for shift in shifts:
        where = "as written" if shift.by == 0 else f"{abs(shift.by)} block {'later' if shift.by > 0 else 'earlier'}"
        value, low, high = shift.alpha
        print(f"alpha_expected at T = 1, taps {where:15}: {value:.3f} ({low:.3f} to {high:.3f})")
    return problems + shifted_taps(head, shifts)


def answers(target: Target, prompts: Sequence[Prompt], *, max_new_tokens: int) -> list[Row]:
    """The target's greedy answers: the text that a draft is judged on."""
    requests = [
        Request(i, p.token_ids, max_new_tokens)
        for i, p in enumerate(prompts)
        if len(p.token_ids) + max_new_tokens <= target.max_positions
    ]
    greedy = SamplingParams.of(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    answered = generate_rows(
        target.model, requests, greedy, batch_size=8, eos_token_ids=target.eos_token_ids, vocab_size=target.vocab_size
    )
    rows = {answer.key: answer.token_ids for answer in answered}
    return [([*p.token_ids, *rows[i]], len(p.token_ids)) for i, p in enumerate(prompts) if len(rows.get(i, ())) > 1]


@torch.no_grad()
def acceptance_by_shift(target: Target, head: EagleHead, rows: Sequence[Row]) -> list[Shift]:
    """Expected acceptance with the taps as written, and one block earlier and later where the target has these.

    alpha = mean over the tokens of the answers, the first one aside, of sum_v min(target_v, draft_v), as in eval.alpha.
    An EAGLE-1 head has no taps: it is measured as it is.
    """
    tap_ids = head.config.tap_ids
    shifts = [by for by in (0, -1, 1) if all(0 <= i + by < target.num_blocks for i in tap_ids)] if tap_ids else [0]
    union = sorted({i + by for i in tap_ids for by in shifts})
    head = head.to(target.device)
    for parameter in head.parameters():
        parameter.data = parameter.data.to(target.dtype)
    sums = np.zeros((len(shifts), len(rows)))
    counts = np.zeros(len(rows))
    before, target.tap_ids = target.tap_ids, tuple(union) or None
    try:
        for row, (ids, num_prompt) in enumerate(rows):
            input_ids = torch.tensor([ids], device=target.device)  # (1, T)
            states = target.states(input_ids)
            slots = slice(
                num_prompt - 1, len(ids) - 2
            )  # slot t drafts x[t+2]; the answer's first token is never drafted
            target_logits = target.logits(states.final_hidden[0, 1:][slots]).float()  # (n, V)
            counts[row] = len(target_logits)
            for which, by in enumerate(shifts):
                features = states.final_hidden if not tap_ids else pick(states.taps, union, [i + by for i in tap_ids])
                positions = torch.arange(len(ids) - 1, device=target.device)[None]  # (1, T - 1)
                out = head(input_ids[:, 1:], head.project(features[:, :-1]), positions)  # (1, T - 1, D)
                draft_logits = head.logits(out[0, slots]).float()  # (n, Vd)
                draft_ids = head.draft_vocab if head.config.version == 3 else None
                alpha = token_alpha(target_logits, draft_logits, temperature=1.0, draft_ids=draft_ids)  # (n,)
                sums[which, row] = alpha.sum().item()
    finally:
        target.tap_ids = before
    return [Shift(by, sums[which], counts) for which, by in enumerate(shifts)]


def pick(taps: Tensor, union: Sequence[int], wanted: Sequence[int]) -> Tensor:  # (B, T, |union|, D) -> (B, T, L, D)
    return taps[:, :, [union.index(i) for i in wanted]]


def shifted_taps(head: EagleHead, shifts: Sequence[Shift], *, margin: float = 0.01) -> list[str]:
    """A line where other taps are clearly better: by more than `margin`, and by an interval that lies above zero."""
    as_written = next(shift for shift in shifts if shift.by == 0)
    better = [s for s in shifts if s.by and (gain := s.gain(as_written))[1] > 0 and gain[0] > margin]
    if not better:
        return []
    best = max(better, key=lambda shift: shift.alpha[0])
    written, trained = list(head.config.tap_ids), [i + best.by for i in head.config.tap_ids]
    return [
        f"shifted taps, by {-best.by:+d}: alpha is {as_written.alpha[0]:.3f} with {written} as written and "
        f"{best.alpha[0]:.3f} with {trained}; write {trained}"
    ]


@entry("check_export")
def main(cfg: DictConfig) -> None:
    with_target = any(o.lstrip("+").startswith("target") for o in HydraConfig.get().overrides.task)
    problems = check(cfg, with_target=with_target)
    for problem in problems:
        print(f"problem: {problem}")
    if problems:
        raise UserError(f"folder={cfg.folder}: {len(problems)} problem{'s' * (len(problems) > 1)}, listed above")
    print(
        f"{cfg.folder}: nothing that an engine would get wrong" + ("" if with_target else "; add target=... for more")
    )


if __name__ == "__main__":
    main()
