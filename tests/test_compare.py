"""One table of all ways of decoding: its rows, its figures by hand, memory in a process of its own, mistakes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

import eval.compare
import eval.memory
from eval.compare import fitting_prompts, run_compare, spread
from eval.compare_figures import Timed, in_turn, row_metrics
from eval.compare_rows import Entrant, Row, label_of, make_rows, slug_of, tapped, unique_slugs
from eval.compare_view import cells, sentences, tables
from eval.entry import CONF_DIR, check_config
from eval.loop import DecodeResult, Round
from eval.memory import peak_of_row, peak_resident_gb
from eval.prompts import Prompt
from eval.results import Metric, read_results
from eval.tree import TreeShape
from models.drafts import gpt2_draft
from models.eagle import build_eagle
from models.errors import UserError
from models.target import Target, load_target

TARGET = {"_target_": "models.target.load_target", "source": "random:tiny_llama", "dtype": "fp32", "device": "cpu"}
SMALL = (
    "target=tiny_random", "dtype=fp32", "device=cpu", "compare.sets=[mt_bench,gsm8k]", "compare.num_prompts=1",
    "compare.max_new_tokens=6", "compare.batch_sizes=[2]", "compare.num_batches=1",
    "compare.methods=[chain_k2,static_2x1,dynamic_d2_k2_n3,lookahead_w2_n3_g2,ngram_n2_k2]",
)  # fmt: skip


def small_draft(**shape) -> torch.nn.Module:
    return gpt2_draft(259, **{"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 1024, **shape}).eval()


def small_head(target: Target, kind: str = "eagle3") -> torch.nn.Module:
    return build_eagle(target=target, kind=kind, draft_vocab_size=64 if kind == "eagle3" else None)


@pytest.fixture(scope="module")
def tapped_target() -> Target:
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


def config(root: Path, *overrides: str) -> DictConfig:
    roots = [
        f"{key}_root={root / name}" for key, name in (("checkpoint", "runs"), ("output", "out"), ("cache", "cache"))
    ]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        cfg = compose("compare", overrides=[*SMALL, *roots, *overrides])
    check_config(cfg)
    return cfg


def save_run(root: Path, name: str, draft: torch.nn.Module, target: Target, *overrides: str, **hashes: str) -> None:
    folder = root / "runs" / name
    draft.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    cfg = config(root, f"run={name}", *overrides)
    OmegaConf.save(cfg, folder / "resolved_config.yaml", resolve=False)
    (folder / "run.json").write_text(json.dumps({"target": hashes}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tapped_target: Target) -> Path:
    """A head that reads taps, one that reads none, and a draft model."""
    root = tmp_path_factory.mktemp("compare")
    save_run(root, "taps", small_head(tapped_target), tapped_target, "target.tap_ids=default")
    save_run(root, "final", small_head(tapped_target, "eagle1"), tapped_target)
    save_run(root, "model", small_draft(), tapped_target)
    return root


def compared(root: Path, *overrides: str) -> dict[str, Metric]:
    return run_compare(config(root, *overrides), overrides)


def test_the_table_has_each_row(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(eval.compare, "peak_of_row", lambda row, **options: asked.append((row, options)) or 0.5)
    metrics = compared(runs, "compare.runs=[taps,final,model]")
    shapes = ("chain_k2", "static_2x1", "dynamic_d2_k2_n3")
    drafts = ("eagle3", "eagle1", slug_of(small_draft()))
    rows = [f"{draft}/{shape}" for draft in drafts for shape in shapes]
    rows += ["lookahead_w2_n3_g2", "ngram_n2_k2", "generate", "generate/ngram_n2_k2"]
    rows += [f"generate/assisted_k2/{drafts[-1]}"]
    for degrees in ("T0", "T1"):
        for row in ("plain", *rows):
            where = f"{degrees}/{row}"
            assert metrics[f"tau/{where}"].n == 2 and metrics[f"tokens_per_s/{where}"].value > 0, where
            assert metrics[f"peak_gb/{where}"].value == 0.5
            has_alpha = "chain" in row or "ngram" in row or "assisted" in row
            assert (f"alpha/{where}" in metrics) <= has_alpha, where
        assert metrics[f"alpha/{degrees}/eagle3/chain_k2"] and metrics[f"plain_vs_generate/{degrees}"].value > 0
        assert metrics[f"tau/{degrees}/plain"].value == metrics[f"speedup/{degrees}/plain"].value == 1
        for draft in drafts:
            assert metrics[f"speedup/{degrees}/batch2/{draft}/chain_k2"].n == 1
    for row in (*rows, *(f"batch2/{draft}/chain_k2" for draft in drafts)):
        assert metrics[f"greedy_failures/T0/{row}"] == Metric(0, None, 2), row
        assert f"greedy_failures/T1/{row}" not in metrics
    options = dict(asked)
    assert list(options) == ["plain", *rows] and options["plain"]["draft"] is None
    assert options["eagle3/static_2x1"]["draft"]["slug"] == "eagle3" and options["eagle3/static_2x1"]["methods"]
    json.dumps(options["eagle3/static_2x1"])

    folder = runs / "out" / "compare"
    results = read_results(folder / "results.json")
    assert set(results["metrics"]) == set(metrics) and set(results["draft"]) == set(drafts)
    text, told = (folder / "compare.md").read_text(), capsys.readouterr().out
    assert all(text.count(f"`{row}`") == 2 and row in told for row in rows)
    assert "## T = 1, batches" in text and "as fast as transformers' generate" in text and "as fast as" in told
    assert (folder / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_another_comparison_takes_the_place_of_the_one_before(runs: Path) -> None:
    options = (
        "compare.generate=false",
        "compare.batch_sizes=[]",
        "compare.memory_prompts=0",
        "compare.temperatures=[1]",
    )
    metrics = compared(runs, "draft=none", "compare.methods=[ngram_n2_k2]", *options)
    results = read_results(runs / "out" / "compare" / "results.json")
    assert set(results["metrics"]) == set(metrics)
    assert {key.split("/", 1)[1] for key in metrics} == {"T1/plain", "T1/ngram_n2_k2"}
    assert results["draft"] == {"none": "no draft"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["compare.runs=[taps,gone]"], r"run=gone: no such run; there are: final, model, taps"),
        (["compare.runs=[model,model]"], r"compare\.runs=\['model', 'model'\]: model is there twice"),
        (["compare.methods=[chain_k2,chain_2]"], r"compare\.methods=chain_2: no such method"),
        (["compare.methods=[chain_k2,chain_k2]"], r"compare\.methods=\[.*\]: must be .* no value twice"),
        (["run=taps", "compare.methods=[static_65]"], r"compare\.methods=static_65: 65 children .* 64 ids.*\(taps\)"),
        (["compare.sets=[mtbench]"], r"compare\.sets=mtbench: no such set"),
        (["run=model", "compare.max_new_tokens=1020"], r"compare\.max_new_tokens=1020: no prompt"),
        (["draft=hf"], r"draft\.id: not given"),
        (["compare.temperatures=[-1]"], r"compare\.temperatures"),
        (["run=model", "compare.batch_sizes=[1000]", "compare.sets=[mt_bench]"], r"compare\.batch_sizes=\[1000\]"),
    ],
)
def test_a_mistake_is_told_by_its_key(overrides: list[str], message: str, runs: Path) -> None:
    with pytest.raises(UserError, match=rf"^{message}"):
        compared(runs, *overrides)


def test_runs_of_two_targets_are_refused(tmp_path: Path, tapped_target: Target) -> None:
    hashes = {"target_config": "a", "target_weights": "b"}
    save_run(tmp_path, "one", small_draft(), tapped_target, **hashes)
    save_run(tmp_path, "two", small_draft(), tapped_target, "target.source=random:tiny_gpt2", "target.name=other")
    with pytest.raises(UserError, match=r"^compare\.runs: one is for target random:tiny_llama and two for .*tiny_gpt2"):
        compared(tmp_path, "compare.runs=[one,two]")


def test_a_run_beside_the_list_is_compared_as_well_and_only_once(runs: Path) -> None:
    names = [
        [run.name for run in eval.compare_rows.find_runs(config(runs, *given), default_to_newest=True)]
        for given in (["run=model", "compare.runs=[final]"], ["run=model", "compare.runs=[final,model]"], ["run=final"])
    ]
    assert names == [["model", "final"], ["final", "model"], ["final"]]


def timed(rounds: list[tuple[int, int]], num_tokens: int, seconds: float) -> Timed:
    """rounds: (judged, accepted)."""
    of_rounds = [Round(3, judged, accepted, accepted, 3) for judged, accepted in rounds]
    return Timed([DecodeResult([0] * num_tokens, [0] * num_tokens, "length", of_rounds)], seconds)


def test_figures_by_hand() -> None:
    """5 + 4 tokens; the first one of each is the prefill's, but for assisted generation, whose first forward drafts."""
    trials = [timed([(3, 2), (3, 1)], 6, 2.0), timed([(3, 3)], 5, 1.0)]
    plain = [timed([], 6, 3.0), timed([], 5, 2.5)]
    row = Row("x/chain_k3", "x", None, None, TreeShape.chain(3))
    ours = row_metrics(row, trials, plain, suffix="s")
    assert ours["tau/s"].value == (5 + 4) / 3 and ours["alpha/s"].value == 6 / 9
    assert ours["tokens_per_s/s"].value == 11 / 3 and ours["speedup/s"].value == pytest.approx(5.5 / 3)
    assert ours["tau/s"].ci95 == (5 / 2, 4.0) and ours["tau/s"].n == 2
    theirs = row_metrics(replace(row, first_round_reads_prompt=True), trials, plain, suffix="s")
    assert theirs["tau/s"].value == 11 / 3
    tree = replace(row, shape=TreeShape.parse("static_2x1"))
    assert "alpha/s" not in row_metrics(tree, trials, plain, suffix="s")


def test_the_order_alternates_after_a_warm_up(tiny_target: Target) -> None:
    order: list[tuple[str, str, int]] = []
    prompts = [[Prompt("s", str(i), "", (1,))] for i in range(2)]
    calls = {
        name: lambda group, length, name=name: order.append((name, group[0].prompt_id, length)) or [] for name in "abc"
    }
    bar = type("Bar", (), {"advance": lambda self, count: None})()
    in_turn(calls, prompts, max_new_tokens=40, device=tiny_target.device, bar=bar)
    assert order[:3] == [("a", "0", 8), ("b", "0", 8), ("c", "0", 8)]
    assert order[3:] == [(n, "0", 40) for n in "abc"] + [(n, "1", 40) for n in "cba"]


def test_drafts_are_named_by_their_kind_and_by_their_run_where_two_are_alike(tapped_target: Target) -> None:
    draft, head = small_draft(n_embd=256, n_layer=2), small_head(tapped_target)
    assert (slug_of(draft), label_of(draft)) == ("gpt2_2m", "2M GPT-2 draft")
    assert (slug_of(head), label_of(head)) == ("eagle3", "EAGLE-3")
    alike = [Entrant(f"run{i}", "eagle3", "EAGLE-3", "", None, tapped_target, head) for i in range(2)]
    other = Entrant("x", "gpt2_2m", "2M GPT-2 draft", "", None, tapped_target, draft)
    assert [e.slug for e in unique_slugs([*alike, other])] == ["run0", "run1", "gpt2_2m"]
    rows = make_rows(tapped_target, unique_slugs([*alike, other]), [TreeShape.chain(2)], generate=True)
    assert [row.key for row in rows] == [
        "plain", "run0/chain_k2", "run1/chain_k2", "gpt2_2m/chain_k2", "generate", "generate/assisted_k2/gpt2_2m",
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"compare\.runs: two drafts are called run0"):
        unique_slugs([alike[0], alike[0]])


def test_one_model_serves_heads_with_other_taps(tiny_target: Target) -> None:
    view = tapped(tiny_target, [1, 3])
    assert view.tap_ids == (1, 3) and tiny_target.tap_ids is None and view.model is tiny_target.model
    ids = torch.tensor([[1, 2, 3]])
    assert view.states(ids).taps.shape[2] == 2 and tiny_target.states(ids).taps is None


def test_prompts_leave_room_for_all_tokens_in_every_draft(tiny_target: Target, capsys) -> None:
    draft = Entrant("x", "x", "x", "", None, tiny_target, small_draft(n_positions=300))
    compare = {"sets": ["mt_bench"], "max_new_tokens": 100}
    prompts = fitting_prompts(tiny_target, [draft], compare, 10)
    assert 0 < len(prompts) < 10 and max(len(p.token_ids) for p in prompts) <= 200
    assert f"{10 - len(prompts)} of 10 prompts left out" in capsys.readouterr().out
    assert len(fitting_prompts(tiny_target, [], compare, 10)) == 10


def test_prompts_of_a_batch_come_from_all_sets() -> None:
    prompts = [Prompt(name, str(i), "", ()) for name in "ab" for i in range(3)]
    assert [(p.set_name, p.prompt_id) for p in spread(prompts, 4)] == [("a", "0"), ("b", "0"), ("a", "1"), ("b", "1")]


def test_what_is_slower_or_wrong_is_said() -> None:
    metrics = {
        "tau/T0/x/chain_k3": Metric(1.5, (1.2, 1.8), 4), "speedup/T0/x/chain_k3": Metric(0.8, (0.7, 0.9), 4),
        "greedy_failures/T0/x/chain_k3": Metric(1, None, 4), "greedy_near_ties/T0/x/chain_k3": Metric(2, None, 4),
        "plain_vs_generate/T0": Metric(0.9, (0.8, 0.95), 4), "tau/T0/batch4/plain": Metric(1.0),
    }  # fmt: skip
    found = cells(metrics, "T0/x/chain_k3")
    assert found == ("1.50 [1.20, 1.80]", "-", "-", "0.80 [0.70, 0.90] slower", "-", "2 of 4, 1 FAIL")
    labels = {"plain": "none", "x/chain_k3": "X", "batch4/plain": "none"}
    told = "\n".join(sentences(metrics, labels, 0.0))
    assert "SLOWER, so that speed-ups over it flatter" in told and "slower than plain decoding: x/chain_k3" in told
    assert "fair base" in sentences({"plain_vs_generate/T0": Metric(1.0)}, labels, 0.0)[0]
    assert {name: [row[0] for row in rows] for name, rows in tables(metrics, labels, 0.0).items()} == {
        "T = 0, batch 1": ["x/chain_k3"], "T = 0, batches": ["batch4/plain"],
    }  # fmt: skip


def test_a_draft_may_be_called_like_a_row() -> None:
    keys = ("batch4/chain_k3", "generate_1/chain_k3", "batch2/plain", "batch2/batch4/chain_k3", "generate/ngram_n3_k5")
    metrics = {f"tau/T0/{key}": Metric(1.5) for key in keys} | {f"speedup/T0/{key}": Metric(1.1) for key in keys}
    metrics |= {"speedup/T0/generate_1/chain_k3": Metric(1.2), "speedup/T0/generate/ngram_n3_k5": Metric(1.3)}
    labels = dict.fromkeys(keys, "a draft")
    found = {name: [row[0] for row in rows] for name, rows in tables(metrics, labels, 0.0).items()}
    assert found["T = 0, batches"] == ["batch2/plain", "batch2/batch4/chain_k3"]
    told = "T = 0: fastest at batch 1 is generate_1/chain_k3, 1.20 times plain decoding"
    assert sentences(metrics, labels, 0.0) == [told]


MEMORY = {
    "target": TARGET, "draft": None, "methods": [], "prompts": [[1, 2, 3]], "temperatures": [0.0], "max_new_tokens": 2,
}  # fmt: skip


def test_the_peak_is_that_of_a_process_of_its_own() -> None:
    """What this process holds, a gigabyte more, does not count."""
    ballast = torch.ones(250_000_000)
    assert 0.05 < peak_of_row("plain", **MEMORY) < peak_resident_gb() - ballast.nbytes / 2e9


def test_a_row_with_a_draft_is_measured(runs: Path) -> None:
    draft = {"slug": "gpt2_tiny", "name": "model", "source": str(runs / "runs" / "model"), "tap_ids": None}
    row = "generate/assisted_k2/gpt2_tiny"
    assert peak_of_row(row, **{**MEMORY, "draft": draft, "methods": ["chain_k2"]}) > 0.05


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.memory.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="memory of plain died: exit code 1"):
        peak_of_row("plain", **MEMORY)
