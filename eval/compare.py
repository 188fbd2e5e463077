"""Ways of decoding side by side: python -m eval.compare [run=NAME] ['compare.runs=[NAME,NAME]'] -> outputs/compare

1. the drafts of all runs on one target; a row for plain decoding, for each draft and method, for lookahead and prompt
   n-grams, for Hugging Face's generate (eval/compare_rows.py)
2. each row's peak memory, in a fresh process
3. by temperature: every row warmed up, then every prompt by all rows in turn (the order alternates), seconds of whole
   calls by one clock; greedy texts are compared with the plain ones by the rule of eval.decode
4. the same for batches: plain and the first chain of each draft
5. after each temperature results.json, compare.md and compare.png are written: keys such as `tau/T0/eagle3/chain_k3`

    tau           tokens a round; of assisted generate every forward is one, also that which reads the prompt
    alpha         accepted / judged drafted tokens, where each depth has one
    tokens_per_s  prefill included
    speedup       plain seconds a token / this row's
    plain_vs_generate  generate's seconds a token / those of our plain decoding: a fair base is 1 or more
    greedy_failures, greedy_near_ties  of greedy texts, see eval.decode
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

from data.progress import ProgressBar
from eval.compare_figures import batched_rows, compare_batches, compare_prompts
from eval.compare_rows import Entrant, Row, fingerprints, load_entrants, make_rows
from eval.compare_view import COLUMNS, markdown, plot_compare, sentences, tables
from eval.drafters import check_attention, check_ragged, masked_models
from eval.entry import entry
from eval.memory import peak_of_row
from eval.prompts import Prompt, load_prompts, prompts_fingerprint
from eval.report import print_table
from eval.results import Metric, make_header, merge_results, write_atomic
from eval.run import draft_fingerprint
from eval.tree import TreeShape
from models.errors import UserError
from models.target import Target
from models.tiny import byte_tokenizer


def measure_memory(
    rows: Sequence[Row],
    prompts: Sequence[Prompt],
    target_config: Mapping[str, Any],
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    bar: ProgressBar,
) -> dict[str, Metric]:
    """`peak_gb` of each row: the largest over all temperatures, so the same at each."""
    metrics = {}
    for row in rows:
        e = row.entrant
        peak = peak_of_row(
            row.key,
            target=dict(target_config),
            draft=e and {"name": e.name, "source": e.source, "tap_ids": e.tap_ids, "slug": e.slug},
            methods=[str(row.shape)] if row.shape else [],
            prompts=[prompt.token_ids for prompt in prompts],
            temperatures=temperatures,
            max_new_tokens=max_new_tokens,
        )
        metrics |= {f"peak_gb/T{t:g}/{row.key}": Metric(peak, None, len(prompts)) for t in temperatures}
        bar.advance(1)
    return metrics


def fitting_prompts(
    target: Target, entrants: Sequence[Entrant], compare: Mapping[str, Any], num_prompts: int
) -> list[Prompt]:
    """Prompts that leave room for all new tokens in the target and in every draft model: the same budget for all."""
    prompts = load_prompts(compare["sets"], target.tokenizer, num_prompts=num_prompts, group="compare")
    models = [e.draft for e in entrants if isinstance(e.draft, PreTrainedModel)]
    limits = [getattr(m.config.get_text_config(), "max_position_embeddings", None) or 1 << 30 for m in models]
    limit = min(target.max_positions, *limits, 1 << 30) - compare["max_new_tokens"]
    fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    if not fitting:
        raise UserError(
            f"compare.max_new_tokens={compare['max_new_tokens']}: no prompt of compare.sets={list(compare['sets'])} "
            f"leaves room for so many tokens in {limit + compare['max_new_tokens']} positions; use fewer"
        )
    if len(fitting) < len(prompts):
        print(f"compare: {len(prompts) - len(fitting)} of {len(prompts)} prompts left out, too long for all positions")
    return fitting


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts, one of each set in turn."""
    sets = list(dict.fromkeys(prompt.set_name for prompt in prompts))
    places = {name: 0 for name in sets}
    order = []
    for prompt in prompts:
        order.append((places[prompt.set_name], sets.index(prompt.set_name), prompt))
        places[prompt.set_name] += 1
    return [prompt for *_, prompt in sorted(order, key=lambda each: each[:2])][:count]


def check_compare(compare: Mapping[str, Any]) -> list[TreeShape]:
    """The methods. Raises UserError, naming the key, before anything is loaded."""
    shapes = [TreeShape.parse(name, key="compare.methods") for name in compare["methods"]]
    load_prompts(compare["sets"], byte_tokenizer(), num_prompts=1, group="compare")
    names = [str(shape) for shape in shapes]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"compare.methods={list(compare['methods'])}: {min(repeated)} stands there twice; leave one out"
        )
    return shapes


def run_compare(cfg: DictConfig, overrides: Sequence[str]) -> dict[str, Metric]:
    """All steps of the module's first lines; the figures."""
    compare = OmegaConf.to_container(cfg.compare, resolve=True)
    shapes = check_compare(compare)
    config, target, entrants = load_entrants(cfg, overrides)
    models = masked_models(target, *(entrant.draft for entrant in entrants))
    check_attention(models, shapes, key="compare.methods")
    if compare["batch_sizes"]:
        check_ragged(models, setting=f"compare.batch_sizes={compare['batch_sizes']}")
    rows = make_rows(target, entrants, shapes, generate=compare["generate"])
    temperatures, max_new_tokens, seed = (compare[key] for key in ("temperatures", "max_new_tokens", "seed"))
    prompts = fitting_prompts(target, entrants, compare, compare["num_prompts"])
    of_batches = batched_rows(entrants, shapes) if compare["batch_sizes"] else []
    batches = prompts_of_batches(target, entrants, compare) if of_batches else {}
    labels = {row.key: row.label for row in rows}
    labels |= {f"batch{size}/{row.key}": row.label for size in batches for row in of_batches}

    folder = Path(cfg.output_root) / "compare"
    folder.mkdir(parents=True, exist_ok=True)  # first: what is measured must find a place
    header = make_header(
        device=target.device,
        dtype=target.dtype,
        target={"name": target.name, **target.fingerprint()},
        draft=fingerprints(entrants, draft_fingerprint) or {"none": "no draft"},
        data={"prompts": prompts_fingerprint(prompts), "size": f"{len(prompts)} prompts x {max_new_tokens} tokens"},
    )
    title = f"Ways of decoding {target.name}"
    notes = [
        f"`{header['command']}`",
        f"{header['device']}, {header['dtype']}; {header['data']['size']}, every row in turn.",
        "Intervals: 95 % over prompts, in rows of batches over batches.",
        "peak GB: the most memory of a fresh process while it decodes, Python and weights included.",
        "other texts: greedy texts that part from plain decoding at a near tie; failures would be counted beside.",
    ]
    for entrant in entrants:
        print(f"{entrant.slug}: {entrant.label}, {entrant.name}")
    peaks: dict[str, Metric] = {}
    if compare["memory_prompts"]:
        with ProgressBar("memory", len(rows), "rows") as bar:
            peaks = measure_memory(
                rows,
                spread(prompts, compare["memory_prompts"]),
                OmegaConf.to_container(config.target, resolve=True),
                temperatures=temperatures,
                max_new_tokens=max_new_tokens,
                bar=bar,
            )
    metrics: dict[str, Metric] = {}
    num_calls = len(prompts) * len(rows) + sum(len(batches[size]) // size * len(of_batches) for size in batches)
    with ProgressBar("comparing", num_calls * len(temperatures), "calls") as bar:
        options = {"max_new_tokens": max_new_tokens, "seed": seed, "bar": bar}
        for number, temperature in enumerate(temperatures):
            degrees = f"T{temperature:g}"
            found = compare_prompts(target, rows, prompts, temperature=temperature, **options)
            for size, of_size in batches.items():
                found |= compare_batches(
                    target, of_batches, of_size, batch_size=size, temperature=temperature, **options
                )
            metrics |= found | {key: value for key, value in peaks.items() if f"/{degrees}/" in key}
            done = temperatures[: number + 1]
            write_compare(folder, header, metrics, labels, done, title=title, notes=notes)
    for temperature in temperatures:
        for name, rows_of in tables(metrics, labels, temperature).items():
            print_table(f"{title}, {name} [95 % interval]", ("row", "draft", *COLUMNS), rows_of)
    for temperature in temperatures:
        for sentence in sentences(metrics, labels, temperature):
            print(sentence)
    return metrics


def prompts_of_batches(
    target: Target, entrants: Sequence[Entrant], compare: Mapping[str, Any]
) -> dict[int, list[Prompt]]:
    """For each batch size the prompts of all its batches, sets in turn."""
    found = {}
    for size in compare["batch_sizes"]:
        count = size * compare["num_batches"]
        prompts = spread(fitting_prompts(target, entrants, compare, count), count)
        if whole := len(prompts) // size * size:
            found[size] = prompts[:whole]
        else:
            raise UserError(
                f"compare.batch_sizes={list(compare['batch_sizes'])}: only {len(prompts)} prompts; use fewer"
            )
    return found


def write_compare(
    folder: Path,
    header: Mapping[str, Any],
    metrics: Mapping[str, Metric],
    labels: Mapping[str, str],
    temperatures: Sequence[float],
    *,
    title: str,
    notes: Sequence[str],
) -> list[Path]:
    """results.json, compare.md and compare.png of one comparison; nothing of an earlier one stays beside it."""
    path = folder / "results.json"
    merge_results(path, header, metrics, is_stale=lambda key: True, overwrite=True)
    text = markdown(metrics, labels, temperatures, title=title, notes=notes)
    write_atomic(folder / "compare.md", text)
    plot_compare(metrics, labels, temperatures, folder / "compare.png", title=title)
    return [path, folder / "compare.md", folder / "compare.png"]


@entry("compare")
def main(cfg: DictConfig) -> None:
    transformers.logging.set_verbosity_error()  # generate warns about options that it gives itself
    run_compare(cfg, HydraConfig.get().overrides.task)
    for name in ("results.json", "compare.md", "compare.png"):
        print(Path(cfg.output_root) / "compare" / name)


if __name__ == "__main__":
    main()
