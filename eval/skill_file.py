"""The file that eval/tune.py leaves behind: when to decode speculatively on this machine, how, and when to stop.

Rendered from the dict beside it (skill-speculative-tuning.json) alone. The format is that of agents' skills: front
matter with name and description, then what to do in order, with the figures that were measured.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from eval.tree import TreeShape
from models.servable import DRAFT_MODEL, MEDUSA, servable
from models.serve_command import SGLANG_ALGORITHMS, TRTLLM_TYPES, VLLM_METHODS

Row = Mapping[str, Any]  # a candidate of the dict


def skill_text(content: Mapping[str, Any]) -> str:
    parts = [
        front_matter(content),
        when_to_use(content),
        inputs(content),
        *(temperature_section(content, t) for t in content["temperatures"]),
        flags_section(content),
        fallback_section(content),
        limits(content),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(content: Mapping[str, Any]) -> str:
    name = "speculative-tuning" + (f"-{content['name']}" if content["name"] else "")
    chosen = "; ".join(
        f"T = {t}: {what(choice)}" + (f", {choice['measured_speedup'][0]:.2f}x" if choice else "")
        for t, choice in ((t, of_t["choice"]) for t, of_t in content["temperatures"].items())
    )
    description = (
        f"How to decode {content['target']['name']} speculatively for prompts like {content['workload']['source']} on "
        f"{content['device']}: {chosen}. Use it to set draft method and length, and to know when to decode plainly."
    )
    title = f"# Speculative decoding of {content['target']['name']}"
    return f"---\nname: {name}\ndescription: {json.dumps(description)}\n---\n\n{title}"


def what(choice: Row | None) -> str:
    if choice is None:
        return "plain decoding"
    return f"`{choice['method']}` with " + (f"the draft `{choice['run']}`" if choice["run"] else "no draft")


def when_to_use(content: Mapping[str, Any]) -> str:
    work = content["workload"]
    anew = "other" if work["is_measured_anew"] else "the same"
    return f"""## When to use

- Target `{content["target"]["name"]}` ({content["dtype"]}), one sequence at a time, on {content["device"]}.
- Prompts like `{work["source"]}`: {work["prompt_tokens"]:.0f} tokens on average, answers of
  {work["answer_tokens"]:.0f} (at most {work["max_new_tokens"]}).
- Acceptance comes from {work["num_profiled"]} prompts, the measured speed-ups from {work["num_measured"]} {anew} ones.
- For another target, draft, machine or kind of prompt, make this file anew: `{content["command"]}`"""


def inputs(content: Mapping[str, Any]) -> str:
    profile = content["target_profile"]
    both = sorted({int(n) for n in (*profile["causal_s"], *profile["tree_s"])})
    step = by_number(profile["causal_s"])[1]
    causal, tree = by_number(profile["causal_s"]), by_number(profile["tree_s"])
    rows = [
        (str(n), *(f"{1e3 * of[n]:.2f} ms ({of[n] / step:.2f})" if n in of else "-" for of in (causal, tree)))
        for n in both
    ]
    parts = [
        f"## What this machine takes\n\nA forward of the target behind {profile['context']} tokens; in brackets, in "
        "forwards of one token. M drafted tokens need a forward of M + 1.",
        markdown_table(("tokens", "chain", "tree"), rows),
    ]
    for run, of_run in content["draft_profiles"].items():
        rows = [
            (f"chain of {k}, T = {float(t):g}", f"{1e3 * s:.2f} ms ({s / step:.2f})")
            for t, lengths in of_run["chain_s"].items()
            for k, s in by_number(lengths).items()
        ]
        firsts, levels = by_number(of_run["first_s"]), by_number(of_run["level_s"])
        rows += [
            (
                f"tree, {k} nodes a level",
                f"{1e3 * first:.2f} ms ({first / step:.2f}) and {1e3 * levels[k]:.2f} ms ({levels[k] / step:.2f}) a "
                "further level",
            )
            for k, first in firsts.items()
            if k in levels
        ]
        parts += [
            f"Drafting by `{run}` ({content['drafts'][run]['kind']}, `{content['drafts'][run]['folder']}`):",
            markdown_table(("proposal", "time (in target forwards of one token)"), rows),
        ]
    return "\n\n".join(parts)


def by_number(measured: Mapping[Any, float]) -> dict[int, float]:
    """JSON has made texts of the keys."""
    return dict(sorted((int(key), value) for key, value in measured.items()))


def temperature_section(content: Mapping[str, Any], temperature: str) -> str:
    of_t = content["temperatures"][temperature]
    choice = of_t["choice"]
    if choice is None:
        verdict = "Decode plainly: no method was shown to be faster (none has an interval above 1)."
    else:
        interval = "{:.2f} [{:.2f}, {:.2f}]".format(*choice["measured_speedup"])
        verdict = f"Use {what(choice)}: {interval} times as fast as plain decoding."
    parts = [f"## Temperature {temperature}\n\n{verdict}"]
    for run, acceptance in of_t["acceptance"].items():
        chain = ", ".join(f"{a:.2f}" if a is not None else "-" for a in acceptance["chain_alpha_at_depth"])
        parts.append(f"Acceptance of `{run}`, chain, by depth (given the depth before): {chain}.")
        if shares := acceptance.get("tree_rank_shares"):
            rows = [
                (str(depth), *(f"{share:.2f}" for share in of_depth[:4]), f"{sum(of_depth):.2f}")
                for depth, of_depth in enumerate(shares, start=1)
                if any(of_depth)
            ]
            parts += [
                "How often the target's token is the draft's first, second, ... choice, given the path so far:",
                markdown_table(("depth", "1st", "2nd", "3rd", "4th", "any of the best"), rows),
            ]
    parts.append(
        "Measured beside plain decoding (95 % intervals over prompts), and what the figures above had predicted:"
    )
    rows = [
        (
            f"`{m['method']}`",
            m["run"] or "none",
            f"{m['tau']:.2f}",
            "{:.2f} [{:.2f}, {:.2f}]".format(*m["measured_tau"]),
            f"{m['speedup']:.2f}",
            f"{m['speedup_at_measured_tau']:.2f}",
            "{:.2f} [{:.2f}, {:.2f}]".format(*m["measured_speedup"]) + slower(m["measured_speedup"][0]),
            f"{m['break_even_tau']:.2f}",
        )
        for m in of_t["measured"]
    ]
    columns = (
        "method",
        "draft",
        "tau predicted",
        "tau",
        "speed-up predicted",
        "at the measured tau",
        "speed-up",
        "break-even tau",
    )
    parts.append(markdown_table(columns, rows))
    rows = [
        (f"`{c['method']}`", c["run"] or "none", f"{c['tau']:.2f}", f"{c['speedup']:.2f}{slower(c['speedup'])}")
        for c in of_t["best_of_each_kind"]
    ]
    parts += ["Predicted best of each kind:", markdown_table(("method", "draft", "tau", "speed-up"), rows)]
    return "\n\n".join(parts)


def slower(speedup: float) -> str:
    return " slower" if speedup < 1 else ""


def flags_section(content: Mapping[str, Any]) -> str:
    parts = [
        "## Flags\n\nGreedy acceptance carries over to other engines; their seconds do not, so measure there too. "
        "`make export TO=vllm|sglang|trtllm RUN=NAME` writes the folders."
    ]
    if any(of_t["choice"] for t, of_t in content["temperatures"].items() if float(t) > 0):
        parts.append(
            "Above T = 0 our chains draw from the draft, and so does vLLM by the flags below. An engine that proposes "
            "the draft's best tokens instead, as vLLM does with Medusa heads, accepts other counts. vLLM 0.32.0 on a "
            "CPU speculates wrongly there (`docs/serving.md`)."
        )
    for t, of_t in content["temperatures"].items():
        choice = of_t["choice"]
        if choice is None:
            parts.append(f"T = {t}: none; decode plainly.")
            continue
        lines = [f"T = {t}:", "", f"- our own loop: `{own_command(content, choice)}`"]
        lines += [f"- {name}: {flags}" for name, flags in engine_flags(content, of_t).items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def own_command(content: Mapping[str, Any], choice: Row) -> str:
    """Of the run chosen, of any where no draft is asked, or of the pair that the command line gave."""
    drafts = content["drafts"]
    draft = drafts[choice["run"]] if choice["run"] else next(iter(drafts.values()), None)
    arguments = [*content.get("arguments", [])]
    if draft and is_run(draft):
        arguments.append(f"run={draft['folder']}")
    temperature = f"decode.temperatures=[{choice['temperature']:g}]"
    arguments += [f"decode.methods=[{choice['method']}]", temperature, "decode.fallback=auto"]
    return shlex.join(["python", "-m", "eval.decode", *arguments])


def is_run(draft: Row) -> bool:
    """Else its `folder` is what an off-the-shelf draft is loaded from, which engines load as it is."""
    return draft.get("is_run", True)


def engine_flags(content: Mapping[str, Any], of_t: Mapping[str, Any]) -> dict[str, str]:
    """Flags of each engine for the choice of a temperature, or why it has none. Where an engine does not draft the
    chosen kind of shape, the best predicted one that it drafts, by the same draft."""
    choice = of_t["choice"]
    run, shape = choice["run"], TreeShape.parse(choice["method"])
    if run is None:
        vllm = "no such method"
        if shape.kind == "ngram":
            vllm = vllm_config(
                {
                    "method": "ngram",
                    "num_speculative_tokens": shape.depth,
                    "prompt_lookup_max": shape.ngram,
                    "prompt_lookup_min": 1,
                }
            )
        return {"vLLM": vllm}
    draft, target = content["drafts"][run], SimpleNamespace(**content["target_config"])
    kind = draft["kind"]
    rows = [row for row in of_t["best_of_each_kind"] if row["run"] == run]
    best = {TreeShape.parse(row["method"]).kind: TreeShape.parse(row["method"]) for row in rows}
    chain = shape if shape.kind == "chain" else best["chain"]
    tree = shape if shape.kind == "dynamic" else best.get("dynamic", chain)
    drawn = tree if shape.kind != "chain" and kind.startswith("eagle") else chain  # by SGLang

    is_draft_model = kind == DRAFT_MODEL and draft.get("model_type")
    draft_config = SimpleNamespace(model_type=draft["model_type"]) if is_draft_model else None

    def unless_refused(engine: str, flags: str) -> str:
        return servable(target, kind, engine, draft_config=draft_config) or flags

    def folder(engine: str) -> str:
        return f"exports/{run}-{engine}" if is_run(draft) else draft["folder"]

    def limit(flag: str) -> str:
        return f" {flag} {draft['max_positions']}" if draft.get("max_positions") else ""

    vllm = {"method": VLLM_METHODS[kind], "model": folder("vllm"), "num_speculative_tokens": chain.depth}
    if choice["temperature"] > 0 and kind != MEDUSA:
        vllm["draft_sample_method"] = "probabilistic"
    export_of = f"RUN={draft['folder']} ARGS=export.draft_len={chain.depth}"
    of_heads = f" (`make export TO=vllm {export_of}`: it drafts with every head of the folder)"
    sglang = (
        f"`--speculative-algorithm {SGLANG_ALGORITHMS.get(kind)} --speculative-draft-model-path {folder('sglang')} "
        f"--speculative-num-steps {drawn.depth} --speculative-eagle-topk {drawn.top_k or 1} "
        f"--speculative-num-draft-tokens {drawn.num_nodes + 1}{limit('--context-length')}`"
    )
    if is_run(draft):
        trtllm = (
            f"`--config exports/{run}-trtllm/trtllm.yaml{limit('--max_seq_len')}`, with `max_draft_len: {chain.depth}` "
            f"in it (`make export TO=trtllm {export_of}`)"
        )
    else:
        config = {
            "decoding_type": TRTLLM_TYPES.get(kind),
            "max_draft_len": chain.depth,
            "speculative_model": draft["folder"],
        }
        trtllm = (
            f"`--config FILE{limit('--max_seq_len')}`, and in that file `disable_overlap_scheduler: true` and "
            f"`speculative_config: {json.dumps(config)}`"
        )
    return {
        "vLLM": unless_refused(
            "vllm", vllm_config(vllm, limit("--max-model-len")) + (of_heads if kind == MEDUSA else "")
        ),
        "SGLang": unless_refused("sglang", sglang),
        "TensorRT-LLM": unless_refused("trtllm", trtllm),
    }


def vllm_config(config: Mapping[str, Any], limit: str = "") -> str:
    return f"`--speculative-config '{json.dumps(config)}'{limit}`"


def fallback_section(content: Mapping[str, Any]) -> str:
    lines = [
        "## When to fall back to plain decoding",
        "",
        "A round must emit more tokens (tau) than it takes plain steps; below that plain decoding is faster. "
        "`decode.fallback=auto` watches this while decoding and pauses by itself. Greedy text stays what it is; "
        "sampled text keeps its distribution, but a seed does not bring it back, since a clock decides.",
        "",
    ]
    for t, of_t in content["temperatures"].items():
        if (choice := of_t["choice"]) is None:
            lines.append(f"- T = {t}: always.")
            continue
        line = f"- T = {t}, `{choice['method']}`: where tau falls below {choice['break_even_tau']:.2f}"
        if (alpha := choice["break_even_alpha"]) is not None:
            line += f", that is, where fewer than {alpha:.0%} of the judged tokens are accepted"
        lines.append(line + f" (measured here: {choice['measured_tau'][0]:.2f}).")
    return "\n".join(lines)


def limits(content: Mapping[str, Any]) -> str:
    disturbed = ""
    if content["is_disturbed"]:
        disturbed = (
            "\n- Something else ran while the forwards were timed (one token took longer than several): the "
            "predictions promise too much, the measured figures stand."
        )
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"""## Limits

- Batch 1: with more sequences at once a forward of the target is busier, and drafted tokens cost more.
- This machine ({content["device"]}), idle otherwise; {versions}; commit {content["git_sha"][:12]}.
- Softmax temperature only; top-k, top-p and min-p were off.
- Greedy text equals the target's own, sampled text has its distribution; bf16 near ties fall either way.{disturbed}"""


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))
