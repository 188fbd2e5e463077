"""Expected acceptance on held-out text, teacher-forced: python -m eval.alpha [run=NAME | draft=hf draft.id=...].

1. rows become right-padded batches (attention is causal, so padding changes nothing); positions restart with each row
2. target and draft read the same tokens; only positions whose next token is supervised are kept
3. chunk by chunk: both heads, fp32 softmax per temperature, sum_v min(target_v, draft_v)
4. sums per row and position bucket -> ratios of sums with a bootstrap interval over rows
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import PreTrainedModel

from data.progress import ProgressBar
from data.rows import Rows, load_rows
from eval.entry import entry
from eval.html_report import write_report
from eval.report import print_metrics
from eval.results import Metric, check_place, merge_results
from eval.run import Pair, load_pair, needs_draft
from eval.stats import ratio_ci
from eval.wandb_media import log_to_wandb
from models.eagle import EagleHead
from models.errors import UserError
from models.medusa import MedusaHeads
from models.target import Target

TEMPERATURES = (0.0, 0.7, 1.0, 1.5)


def expected_alpha(
    target_logits: Tensor,  # (..., V)
    draft_logits: Tensor,  # (..., Vq) the first V columns are the shared ids
    mask: Tensor,  # (...) bool, True where a token counts
    *,
    temperature: float = 1.0,
) -> Tensor:  # ()
    """Chance that a token sampled from the draft survives verification.

    alpha = mean over positions of sum_v min(target_v, draft_v)
    (Leviathan et al. 2023, arXiv:2211.17192). 1 when the models agree, 0 when they are disjoint, nan where nothing
    counts. temperature 0 compares one-hot distributions: the share of positions with equal argmax.
    """
    alphas = token_alpha(target_logits[mask], draft_logits[mask], temperature=temperature)  # (N,)
    return alphas.sum() / alphas.numel()


def token_alpha(
    target_logits: Tensor,  # (N, V)
    draft_logits: Tensor,  # (N, Vq)
    *,
    temperature: float = 1.0,
    draft_ids: Tensor | None = None,  # (Vq,) target ids of the draft's columns; by default the first Vq
) -> Tensor:  # (N,) fp32
    """sum_v min(target_v, draft_v) of each position, in fp32 whatever the dtype of the logits.

    A draft head may be wider than V (padding: cut off before its softmax) or narrower (target mass on ids that it
    lacks counts as rejected).
    """
    if draft_ids is not None:
        if temperature == 0:
            return (target_logits.argmax(-1) == draft_ids[draft_logits.argmax(-1)]).float()
        target_probs = torch.softmax(target_logits.float() / temperature, -1)[..., draft_ids]
        return torch.minimum(target_probs, torch.softmax(draft_logits.float() / temperature, -1)).sum(-1)
    shared = min(target_logits.shape[-1], draft_logits.shape[-1])
    draft_logits = draft_logits[..., :shared]  # (N, shared)
    if temperature == 0:
        return (target_logits.argmax(-1) == draft_logits.argmax(-1)).float()
    target_probs = torch.softmax(target_logits.float() / temperature, -1)[..., :shared]
    draft_probs = torch.softmax(draft_logits.float() / temperature, -1)
    return torch.minimum(target_probs, draft_probs).sum(-1)


def token_kl_and_entropy(
    target_logits: Tensor,  # (N, V)
    draft_logits: Tensor,  # (N, Vq)
    draft_ids: Tensor | None = None,  # (Vq,)
) -> tuple[Tensor, Tensor]:  # (N,), (N,) nats
    """KL(target || draft) over the shared ids (the target renormalised over them), and the target's entropy."""
    shared = min(target_logits.shape[-1], draft_logits.shape[-1])
    target_logprobs = torch.log_softmax(target_logits.float(), -1)  # (N, V)
    entropy = -torch.linalg.vecdot(target_logprobs.exp(), target_logprobs)
    if draft_ids is not None:
        target_logprobs = torch.log_softmax(target_logits[..., draft_ids].float(), -1)
    elif shared < target_logits.shape[-1]:
        target_logprobs = torch.log_softmax(target_logits[..., :shared].float(), -1)
    draft_logprobs = torch.log_softmax(draft_logits[..., :shared].float(), -1)
    kl = torch.linalg.vecdot(target_logprobs.exp(), target_logprobs - draft_logprobs)
    return kl, entropy


@torch.no_grad()
def evaluate_alpha(
    target: Target,
    draft: PreTrainedModel | EagleHead | MedusaHeads | Target,
    rows: Rows,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    max_tokens: int | None = 50_000,
    position_buckets: Sequence[int] = (64, 128, 256),
    batch_tokens: int = 4096,
    seed: int = 0,
    split: str = "held_out",
) -> dict[str, Metric]:
    """Acceptance that sampling from `draft` would have on `rows`, against the target's full distribution.

    max_tokens: supervised tokens to judge, rows drawn in a seeded order; None: all.
    position_buckets: upper ends of buckets of the position of the last read token; the last bucket is open.
    batch_tokens: padded tokens of one forward. Memory beyond it is bounded: heads and softmax run in chunks.
    Returns `alpha_expected/<split>/T<t>` (also `.../pos_<lo>_<hi>`), `top1_agreement/<split>`, `kl/<split>` and
    `target_entropy/<split>` (nats, temperature 1), `alpha_tokens/<split>`; n counts rows. The draft is put in
    eval mode. Rows longer than either model's positions are cut, which is printed. UserError when no token counts.
    """
    if isinstance(draft, EagleHead):
        reader: Reader = HeadReader(target, draft)
    elif isinstance(draft, MedusaHeads):
        reader = MedusaReader(target, draft)
    else:
        reader = ModelReader(target, draft)
    limit = min(target.max_positions, reader.max_positions)
    chosen, num_cut = _choose_rows(rows, limit=limit, max_tokens=max_tokens, seed=seed)
    if num_cut:
        print(f"alpha: {num_cut} of {len(chosen)} rows cut to {limit} tokens, the shorter model's positions")
    names = [f"T{temperature:g}" for temperature in temperatures]
    edges = np.asarray(sorted(position_buckets), dtype=np.int64)
    figures = [*names, "top1", "kl", "entropy"]
    sums = np.zeros((len(figures), len(chosen), len(edges) + 1))  # (figures, R, buckets)
    counts = np.zeros((len(chosen), len(edges) + 1), dtype=np.int64)  # (R, buckets)
    order = sorted(range(len(chosen)), key=lambda i: -len(chosen[i][0]))  # like lengths together: little padding
    with ProgressBar("alpha", int(sum(mask.sum() for _, mask in chosen)), "tokens") as bar:
        for batch in _batches(order, [len(ids) for ids, _ in chosen], batch_tokens):
            input_ids, mask = _pad([chosen[i] for i in batch], device=target.device)  # (B, T), (B, T)
            row, position, target_hidden, draft_hidden = reader.read(input_ids, mask)
            if not len(row):  # rows too short for a head to draft in
                continue
            values = _token_values(target, reader, target_hidden, draft_hidden, temperatures, bar)  # (figures, N)
            rows_of = np.asarray(batch)[row.cpu().numpy()]
            bucket_of = np.searchsorted(edges, position.cpu().numpy(), side="right")
            np.add.at(counts, (rows_of, bucket_of), 1)
            for figure, value in enumerate(values.cpu().numpy()):
                np.add.at(sums[figure], (rows_of, bucket_of), value)
    if not counts.any():
        raise UserError(
            "data.sources: no held-out row has two supervised tokens side by side behind another one, so a head drafts "
            "nothing there; give more or longer documents"
        )
    return _metrics(sums, counts, figures=figures, names=names, edges=edges, split=split)


class Reader(Protocol):
    """What a draft says of padded rows where a token counts."""

    max_positions: int
    draft_ids: Tensor | None  # target ids of the logits' columns; None: the first ones

    def read(self, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # (B, T) twice
        """Row (N,), position of the last token read (N,), the target's final states (N, D) and the draft's (N, Dd)."""

    def logits(self, hidden: Tensor) -> Tensor:  # (n, Dd) -> (n, Vq)
        """The draft's logits from its states."""


class ModelReader:
    """A draft model reads the tokens alone."""

    draft_ids = None

    def __init__(self, target: Target, draft: PreTrainedModel | Target):
        self.target = target
        self.draft = draft if isinstance(draft, Target) else Target(draft, target.tokenizer, name="draft")
        self.max_positions, self.logits = self.draft.max_positions, self.draft.logits

    def read(self, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        row, position = mask.nonzero(as_tuple=True)  # (N,), (N,)
        hidden = self.target.states(input_ids).final_hidden[row, position]  # (N, D)
        return row, position, hidden, self.draft.states(input_ids).final_hidden[row, position]


class HeadReader:
    """An EAGLE head reads the target's features of slot p and the token x[p+1]; it predicts x[p+2].

    Counted as in the decode loop: a turn's first token is never drafted.
    """

    def __init__(self, target: Target, head: EagleHead):
        self.target, self.head, self.max_positions = target, head, head.config.max_position_embeddings
        self.draft_ids = head.draft_vocab if head.config.version == 3 else None

    def read(self, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        states = self.target.states(input_ids)
        features = states.taps if self.head.config.version == 3 else states.final_hidden
        positions = torch.arange(input_ids.shape[1] - 1, device=input_ids.device).expand(len(input_ids), -1)
        out = self.head(input_ids[:, 1:], self.head.project(features[:, :-1]), positions)  # (B, T - 1, D)
        row, slot = (mask[:, :-1] & mask[:, 1:]).nonzero(as_tuple=True)  # (N,), (N,)
        return row, slot + 1, states.final_hidden[row, slot + 1], out[row, slot]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)


class MedusaReader:
    """Medusa's first head reads the target's state of slot p and predicts x[p+2]; counted as an EAGLE head's slots."""

    def __init__(self, target: Target, heads: MedusaHeads):
        self.target, self.heads, self.max_positions = target, heads, target.max_positions
        self.draft_ids = heads.draft_vocab

    def read(self, input_ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = self.target.states(input_ids).final_hidden  # (B, T, D)
        row, slot = (mask[:, :-1] & mask[:, 1:]).nonzero(as_tuple=True)  # (N,), (N,)
        return row, slot + 1, hidden[row, slot + 1], self.heads(hidden[row, slot], 1)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.heads.logits(hidden[None])[0]


def _token_values(
    target: Target,
    draft: Reader,
    target_hidden: Tensor,  # (N, D)
    draft_hidden: Tensor,  # (N, Dd)
    temperatures: Sequence[float],
    bar: ProgressBar,
) -> Tensor:  # (figures, N)
    ids = draft.draft_ids
    chunk = max(1, (1 << (22 if target.device.type == "cpu" else 26)) // target.vocab_size)  # 16 MB (256 MB) in fp32
    values = []
    for start in range(0, len(target_hidden), chunk):
        target_logits = target.logits(target_hidden[start : start + chunk]).float()  # (n, V)
        draft_logits = draft.logits(draft_hidden[start : start + chunk]).float()  # (n, Vq)
        top1 = token_alpha(target_logits, draft_logits, temperature=0, draft_ids=ids)
        alphas = [
            token_alpha(target_logits, draft_logits, temperature=t, draft_ids=ids) if t else top1 for t in temperatures
        ]
        values.append(torch.stack([*alphas, top1, *token_kl_and_entropy(target_logits, draft_logits, ids)]))
        bar.advance(len(target_logits))
    return torch.cat(values, dim=1)


def _choose_rows(
    rows: Rows, *, limit: int, max_tokens: int | None, seed: int
) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """(ids, pred_mask) of rows in a seeded order until `max_tokens` supervised tokens, and how many were cut."""
    chosen, num_tokens, num_cut = [], 0, 0
    for i in np.random.default_rng(seed).permutation(len(rows)):
        if max_tokens is not None and num_tokens >= max_tokens:
            break
        ids, loss_mask = rows.row(int(i))
        cut = len(ids) > limit
        ids, loss_mask = ids[:limit], loss_mask[:limit]
        pred_mask = np.append(loss_mask[1:], False).astype(bool)  # (T,) True at t where x[t+1] counts
        if pred_mask.any():
            chosen.append((ids, pred_mask))
            num_tokens += int(pred_mask.sum())
            num_cut += cut
    if not chosen:
        raise UserError("data.sources: no supervised token in the held-out rows; give more or longer documents")
    return chosen, num_cut


def _batches(order: list[int], lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Rows, longest first, in batches of at most `batch_tokens` padded tokens (one row at least)."""
    batches: list[list[int]] = []
    for i in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _pad(rows: list[tuple[np.ndarray, np.ndarray]], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids (id 0, never attended to by a real token) and masks, (B, T) each."""
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)  # (B, T)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)  # (B, T)
    for i, (ids, pred_mask) in enumerate(rows):
        input_ids[i, : len(ids)] = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        mask[i, : len(ids)] = torch.from_numpy(pred_mask)
    return input_ids.to(device), mask.to(device)


def _metrics(
    sums: np.ndarray,  # (figures, R, buckets)
    counts: np.ndarray,  # (R, buckets)
    *,
    figures: list[str],
    names: list[str],
    edges: np.ndarray,
    split: str,
) -> dict[str, Metric]:
    def ratio(figure: str, bucket: int | slice = slice(None)) -> Metric:
        tokens = counts[:, bucket].reshape(len(counts), -1).sum(1)  # (R,)
        total = sums[figures.index(figure)][:, bucket].reshape(len(counts), -1).sum(1)  # (R,)
        return Metric.of(ratio_ci(total, tokens), int((tokens > 0).sum()))

    metrics = {f"alpha_expected/{split}/{name}": ratio(name) for name in names}
    lows, highs = [0, *edges.tolist()], [*edges.tolist(), "up"]
    for bucket, (low, high) in enumerate(zip(lows, highs)):
        if counts[:, bucket].any():
            for name in names:
                metrics[f"alpha_expected/{split}/{name}/pos_{low}_{high}"] = ratio(name, bucket)
    metrics[f"top1_agreement/{split}"] = ratio("top1")
    metrics[f"kl/{split}"] = ratio("kl")
    metrics[f"target_entropy/{split}"] = ratio("entropy")
    metrics[f"alpha_tokens/{split}"] = Metric(int(counts.sum()), None, len(counts))
    return metrics


def held_out_rows(data: DictConfig, target: Target) -> Rows:
    """The held-out split of a run's data config. UserError when it is empty."""
    return load_rows(
        OmegaConf.to_container(data.sources, resolve=True),
        target.tokenizer,
        split="held_out",
        max_length=data.max_length,
        held_out_fraction=data.held_out_fraction,
        seed=data.seed,
        max_tokens=data.max_held_out_tokens,
    )


def evaluate_pair(
    pair: Pair,
    alpha: Mapping[str, Any],
    *,
    rows: Rows | None = None,
    seed: int,
    output_root: str | Path,
    overwrite: bool = False,
) -> dict[str, Metric]:
    """Judge a pair by the keys of conf/alpha; print a table, merge into results.json.

    rows: default those of the pair's own data, held-out split.
    """
    rows = held_out_rows(pair.config.data, pair.target) if rows is None else rows
    path, header = Path(output_root) / pair.name / "results.json", pair.header(held_out=rows.fingerprint())
    check_place(path, header, overwrite=overwrite)
    metrics = evaluate_alpha(
        pair.target,
        pair.draft,
        rows,
        temperatures=list(alpha["temperatures"]),
        max_tokens=alpha["max_tokens"],
        position_buckets=list(alpha["position_buckets"]),
        seed=seed,
    )
    measured = tuple(f"{key}/" for key in metrics if key.startswith("alpha_expected/"))  # their former buckets go
    merge_results(path, header, metrics, is_stale=lambda key: key.startswith(measured), overwrite=overwrite)
    print_metrics(f"Expected acceptance of {pair.draft_name} for {pair.target.name}", metrics)
    print(path)
    return metrics


@entry("alpha")
def main(cfg: DictConfig) -> None:
    overrides = HydraConfig.get().overrides.task
    needs_draft(cfg, overrides, "acceptance on held-out text")
    pair = load_pair(cfg, overrides)
    evaluate_pair(pair, cfg.alpha, seed=cfg.seed, output_root=cfg.output_root, overwrite=cfg.overwrite)
    folder, run_folder = Path(cfg.output_root) / pair.name, pair.run and pair.run.owner
    for path in write_report(folder, run_folder=run_folder):
        print(path)
    log_to_wandb(cfg.logger, folder, run_folder=run_folder)


if __name__ == "__main__":
    main()
