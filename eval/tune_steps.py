"""The steps of eval/tune.py that run models: plain answers, the profile, acceptance replayed, the best measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from torch import nn

from eval.decode import decode_trials, prompt_seed
from eval.drafters import make_drafter
from eval.loop import DecodeResult, speculative_decode
from eval.measures import decode_metrics
from eval.ngram import NgramDrafter
from eval.prompts import Prompt
from eval.run import Pair
from eval.tree import TreeShape
from eval.tune_predict import Candidate, Machine, Measured, Plain, candidate, chain_shapes, predict, tree_shapes
from eval.tune_profile import DraftProfile, TargetProfile, loop_seconds, profile_draft, profile_target
from eval.tune_replay import (
    WIDE_TOP_K,
    Replay,
    Text,
    rank_shares,
    replay_chain,
    replay_trees,
    rounds_of,
    wide_shape,
    wide_trees,
)
from models.eagle import EagleHead
from models.errors import UserError
from models.kv_cache import has_own_mask
from models.medusa import MedusaHeads
from models.sampling import SamplingParams
from models.target import Target

NGRAM = 3  # longest ending that is looked up
LOOP_TOKENS = 32  # of the short texts that time the loop
PROFILES = 3  # attempts to time the target undisturbed


@dataclass(frozen=True)
class Draft:
    """A draft to choose from, and how far it goes."""

    model: nn.Module
    target: Target  # with the taps that the draft reads
    max_depth: int
    max_width: int  # children of a node; 0: no trees
    max_positions: int

    @classmethod
    def of(cls, model: nn.Module, target: Target, max_depth: int) -> "Draft":
        positions = getattr(model.config, "max_position_embeddings", None) or target.max_positions
        if isinstance(model, MedusaHeads):
            num_ids, max_depth = model.config.truncated_vocab_size, min(max_depth, model.config.num_heads)
        elif isinstance(model, EagleHead):
            num_ids = model.config.draft_vocab_size
        else:
            num_ids = min(model.get_input_embeddings().weight.shape[0], target.vocab_size)
        is_head = isinstance(model, EagleHead | MedusaHeads)
        has_trees = has_own_mask(target.model) and (is_head or has_own_mask(model))
        return cls(model, target, max_depth, min(WIDE_TOP_K, num_ids) if has_trees else 0, positions)


@dataclass(frozen=True)
class Workload:
    """Plain answers of the profiled prompts at one temperature."""

    temperature: float
    results: list[DecodeResult]
    texts: list[Text]

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(self.temperature)


def answers(
    target: Target, prompts: Sequence[Prompt], temperature: float, *, max_new_tokens: int, seed: int
) -> Workload:
    """Raises UserError where the target ends every text at once."""
    results, texts = [], []
    for prompt in prompts:
        result = speculative_decode(
            target,
            None,
            prompt.token_ids,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            seed=prompt_seed(prompt, seed),
        )
        if len(result.token_ids) > 2:
            results.append(result)
            texts.append(Text(prompt.token_ids, result.token_ids))
    if not texts:
        raise UserError("tune.prompts: the target ends every answer at once; give prompts that it answers")
    return Workload(temperature, results, texts)


def profile_machine(
    target: Target, drafts: Mapping[str, Draft], texts: Sequence[Text], settings: Mapping[str, Any]
) -> tuple[TargetProfile, dict[str, DraftProfile]]:
    """Taken anew where it was disturbed, up to PROFILES times."""
    repeats, temperatures = settings["repeats"], settings["temperatures"]
    context = round(fmean(len(text.prompt) + len(text.answer) / 2 for text in texts))
    further = 2 * (repeats + 2)
    room = min([target.max_positions, *(draft.max_positions for draft in drafts.values())])
    context = max(2, min(context, room - further - settings["max_chain"]))
    ids = [token for text in texts for token in (*text.prompt, *text.answer)]
    ids = (ids * (1 + (context + further) // len(ids)))[: context + further]
    for _ in range(PROFILES):
        target_profile = profile_target(
            target,
            ids[:context],
            max_chain=settings["max_chain"],
            max_tokens=settings["max_nodes"] + 1,
            repeats=repeats,
        )
        if not target_profile.is_disturbed:
            break
        print("tune: a forward of one token took longer than one of more: something else ran meanwhile", flush=True)
    draft_profiles = {
        run: profile_draft(
            draft.target,
            draft.model,
            ids,
            context=context,
            temperatures=temperatures,
            max_chain=draft.max_depth,
            max_depth=draft.max_depth,
            max_width=draft.max_width,
            repeats=repeats,
        )
        for run, draft in drafts.items()
    }
    return target_profile, draft_profiles


def short_runs(
    target: Target, draft: nn.Module | None, work: Workload, method: str, *, num_texts: int, max_new_tokens: int
) -> list[DecodeResult]:
    """By the loop itself; a first short text warms up and is left out."""
    texts = work.texts[:num_texts]
    options = {"method": method, "temperature": work.temperature}
    speculative_decode(target, draft, texts[0].prompt, max_new_tokens=8, **options)
    return [
        speculative_decode(target, draft, text.prompt, max_new_tokens=max_new_tokens, seed=seed, **options)
        for seed, text in enumerate(texts)
    ]


def loop_profile(draft: Draft, work: Workload, max_nodes: int) -> dict[str, dict[int, float]]:
    """Kind of shape -> nodes -> seconds a round."""

    def seconds(method: str) -> float:
        runs = short_runs(draft.target, draft.model, work, method, num_texts=2, max_new_tokens=LOOP_TOKENS)
        return loop_seconds(runs)

    lengths = sorted({min(2, draft.max_depth), draft.max_depth})
    found = {"chain": {k: seconds(f"chain_k{k}") for k in lengths}}
    trees = tree_shapes(min(4, draft.max_depth), min(8, max_nodes), draft.max_width)
    if trees:
        found["tree"] = {8: seconds(str(trees[-1]))}
    return found


def predict_draft(
    run: str, draft: Draft, work: Workload, machine: Machine, plain: Plain, max_nodes: int
) -> tuple[list[Candidate], dict[str, Any]]:
    """All chains and trees of a draft; and what acceptance they stand on."""
    target = draft.target
    options = {"vocab_size": target.vocab_size, "params": work.params, "draft_sampling": "probabilistic"}
    drafter = make_drafter(draft.model, TreeShape.chain(draft.max_depth), **options)
    chains = [replay_chain(target, drafter, text, work.params, draft.max_depth) for text in work.texts]
    told: dict[str, Any] = {"chain_alpha_at_depth": alpha_at_depth(chains)}
    given = {"temperature": work.temperature, "run": run}
    found = [predict(shape, chains, machine, plain, **given) for shape in chain_shapes(draft.max_depth)]
    if "tree" in machine.loop_s:
        shapes = tree_shapes(draft.max_depth, max_nodes, draft.max_width)
        wide = wide_shape(draft.max_depth, draft.max_width)
        drafter = make_drafter(draft.model, wide, **options)
        candidates = [wide_trees(target, drafter, text, draft.max_depth) for text in work.texts]
        told["tree_rank_shares"] = rank_shares(candidates, draft.max_depth)
        replays = [replay_trees(trees, shapes) for trees in candidates]
        found += [predict(shape, [r[shape] for r in replays], machine, plain, **given) for shape in shapes]
    return found, told


def alpha_at_depth(replays: Sequence[Replay]) -> list[float | None]:
    """Of the rounds of the longest chain: how often a depth is accepted where the one before was. Where the text ends
    before that depth nobody judges, and nothing counts."""
    depth = replays[0].survival.shape[1]
    accepted, reached = np.zeros(depth), np.zeros(depth)
    for replay in replays:
        _, starts = rounds_of(replay, depth)
        ahead = np.arange(len(starts), 0, -1)  # (S,) tokens of the text behind each place
        judged = starts[:, None] * (ahead[:, None] > np.arange(depth))  # (S, D)
        before = np.concatenate((np.ones((len(starts), 1)), replay.survival[:, :-1]), axis=1)
        accepted += (judged * replay.survival).sum(0)
        reached += (judged * before).sum(0)
    return [round(a / b, 4) if b > 0 else None for a, b in zip(accepted.tolist(), reached.tolist())]


def predict_draftless(
    target: Target, work: Workload, target_profile: TargetProfile, plain: Plain, settings: Mapping[str, Any]
) -> list[Candidate]:
    """Prompt n-grams replayed, lookahead by short runs."""
    longest = settings["max_chain"]
    shape = TreeShape("ngram", longest, ngram=NGRAM)
    runs = short_runs(target, None, work, str(shape), num_texts=2, max_new_tokens=LOOP_TOKENS)
    drafting = sum(r.draft_s for r in runs) / max(1, sum(len(r.rounds) for r in runs))
    machine = Machine(target_profile, None, {"ngram": {longest: loop_seconds(runs)}}, {"ngram": drafting})
    replays = [replay_chain(target, NgramDrafter(shape), text, work.params, longest) for text in work.texts]
    found = [
        predict(TreeShape("ngram", k, ngram=NGRAM), replays, machine, plain, temperature=work.temperature, run=None)
        for k in range(1, longest + 1)
    ]
    if not target_profile.tree_s:
        return found
    plain_step = sum(r.wall_s - r.prefill_s for r in work.results) / sum(len(r.rounds) for r in work.results)
    length = max(len(text.answer) for text in work.texts)
    for name in settings["lookahead"]:
        runs = short_runs(target, None, work, name, num_texts=max(2, len(work.texts) // 2), max_new_tokens=length)
        num_rounds = sum(len(r.rounds) for r in runs)
        if not num_rounds:  # every text ended in its prefill
            continue
        round_s = sum(r.wall_s - r.prefill_s for r in runs) / num_rounds * (plain.step_s / plain_step)
        tau = sum(len(r.token_ids) - 1 for r in runs) / num_rounds
        nodes = sum(drafted.drafted for r in runs for drafted in r.rounds) / num_rounds
        found.append(
            candidate(TreeShape.parse(name), tau, nodes, round_s, 0.0, plain, temperature=work.temperature, run=None)
        )
    return found


def measure(
    pairs: Mapping[str, Pair],
    prompts: Sequence[Prompt],
    chosen: Sequence[Candidate],
    plain: Plain,
    settings: Mapping[str, Any],
) -> list[Measured]:
    """Candidates of one temperature by the loop, each draft's beside plain decoding, interleaved; the fastest first.
    Those that need no draft go with the first one."""
    found = []
    first = next(iter(pairs))
    for run, pair in pairs.items():
        of_run = [c for c in chosen if (c.run or first) == run]
        if not of_run:
            continue
        trials = decode_trials(
            pair.target,
            pair.draft,
            prompts,
            methods=[c.method for c in of_run],
            temperatures=[of_run[0].temperature],
            max_new_tokens=settings["max_new_tokens"],
            seed=settings["seed"],
        )
        for method, of_method in trials.items():
            metrics = decode_metrics(of_method, shape=method.shape, suffix="")
            speedup, tau = metrics["speedup/"], metrics["tau/"]
            [of_this] = [c for c in of_run if c.method == str(method.shape)]
            at_tau = of_this.with_tau(tau.value, plain).speedup
            found.append(Measured(of_this, (speedup.value, *speedup.ci95), (tau.value, *tau.ci95), at_tau))
    return sorted(found, key=lambda m: -m.speedup[0])
