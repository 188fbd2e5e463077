"""The serving check from end to end on a tiny target: our own loop on the *exported* folder plays vLLM's part."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

import train.serve_check
import train.serve_drafts
from eval.entry import CONF_DIR
from eval.loop import speculative_decode
from eval.results import read_results
from models.drafts import load_draft
from models.errors import UserError
from models.import_head import read_head
from models.medusa import load_medusa
from models.target import load_target
from models.tiny import byte_tokenizer, random_model
from tests.test_medusa import random_heads
from train.serve_check import check_over_fitted, check_run, check_vllm_drafts
from train.serving import Counts, Draft, Served

pytestmark = pytest.mark.long  # trains and exports drafts: minutes

NUM_PRINTABLE = 94  # the byte tokenizer's first ids: ASCII without the space


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target that writes printable text only, so that its answers can be read back as the same ids."""
    folder = tmp_path_factory.mktemp("target")
    model = random_model("tiny_llama", seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[NUM_PRINTABLE:256] = 0
        model.get_input_embeddings().weight[258] = 0
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def of_the_target(source: str) -> list[str]:
    return ["target=hf", f"target.source={source}", "target.name=tiny", "dtype=fp32", "device=cpu"]


@pytest.fixture
def composed(tmp_path: Path, of_the_target: list[str]) -> Iterator:
    """Config of the check, below this test's folder; Hydra stays open for the jobs inside."""
    places = [f"{name}_root={tmp_path / name}" for name in ("checkpoint", "output", "cache")]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        yield lambda *overrides: compose("serve_check", [*of_the_target, *places, *overrides])


class Engine:
    """`generate` and the server, by our own loop on what the folder holds."""

    def __init__(self, source: str):
        self.source, self.drafts = source, []

    def load(self, draft: Draft):
        tap_ids = None
        if draft.kind == "eagle3":
            config = json.loads((draft.folder / "config.json").read_text())
            tap_ids = config.get("eagle_aux_hidden_state_layer_ids", "default")
        target = load_target(self.source, dtype="fp32", device="cpu", tap_ids=tap_ids)
        if draft.kind == "draft_model":
            return target, load_draft(draft.folder).float()
        model = load_medusa(draft.folder, target) if draft.kind == "medusa" else read_head(draft.folder, target)
        return target, model.float()

    def __call__(
        self, model, prompts, *, draft, max_new_tokens, stop_ids, temperature=0.0, seed=0, **_
    ) -> list[Served]:
        self.drafts.append(draft)
        target, loaded = self.load(draft)
        results = [
            speculative_decode(
                target, loaded, ids, method=f"chain_k{draft.draft_len}", max_new_tokens=max_new_tokens,
                eos_token_ids=stop_ids, temperature=temperature, seed=seed + i, draft_sampling=draft.draft_sampling,
            )
            for i, ids in enumerate(prompts)
        ]  # fmt: skip
        return [Served(r.token_ids, Counts.of(r, draft.draft_len)) for r in results]

    @contextmanager
    def server(self, model, *, draft=None, **_) -> Iterator[tuple]:
        yield (self, draft)

    def chat(self, url, messages, *, max_tokens) -> tuple[str, list[int]]:
        target = load_target(self.source, dtype="fp32", device="cpu")
        text = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        if url[1] is None:
            answer = speculative_decode(target, None, ids, max_new_tokens=max_tokens).token_ids
        else:
            [served] = self("", [ids], draft=url[1], max_new_tokens=max_tokens, stop_ids=target.eos_token_ids)
            answer, self.counts = served.token_ids, served.counts
        return target.tokenizer.decode(answer), answer


@pytest.fixture
def engine(source: str, monkeypatch: pytest.MonkeyPatch) -> Engine:
    fake = Engine(source)
    monkeypatch.setattr(train.serve_check, "generate", fake)
    monkeypatch.setattr(train.serve_check, "openai_server", fake.server)
    monkeypatch.setattr(train.serve_check, "chat", fake.chat)
    monkeypatch.setattr(train.serve_check, "server_counts", lambda url, draft_len: fake.counts)
    for name, value in (("NUM_CANDIDATES", 1), ("NUM_ANSWERS", 2), ("MAX_NEW_TOKENS", 20)):
        monkeypatch.setattr(train.serve_drafts, name, value)
    for kind, options in train.serve_drafts.KINDS.items():
        small = ["draft.n_head=2", "draft.n_embd=32"] if kind == "gpt2" else []
        options = [o for o in options if not o.startswith("trainer.max_steps")]
        monkeypatch.setitem(train.serve_drafts.KINDS, kind, [*options, *small, "trainer.max_steps=60"])
    return fake


def test_over_fitted_drafts_are_counted_as_by_our_loop(
    composed, engine: Engine, of_the_target: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    failures, metrics = check_over_fitted(composed(), of_the_target)
    assert failures == []
    for kind in ("eagle3", "eagle1", "medusa", "gpt2", "server"):
        for figure in ("drafts", "accepted", "accepted_at/p1", "accepted_at/p3", "mean_length"):
            assert metrics[f"{kind}/ours/{figure}"].value == metrics[f"{kind}/vllm/{figure}"].value
    assert metrics["eagle3/ours/mean_length"].value > 2, "over-fitted, and hardly accepted"
    kinds = ["eagle3", "eagle1", "medusa", "draft_model", "eagle3", "eagle3"]
    assert [draft.kind for draft in engine.drafts] == kinds
    results = read_results(tmp_path / "output" / "serve-check" / "results.json")
    assert results["metrics"]["failures"]["value"] == 0 and "eagle3_weights" in results["draft"]
    out = capsys.readouterr().out
    assert "equal" in out and "told apart" in out and "UNEQUAL" not in out

    # again: nothing is trained anew, and an engine that miscounts is found
    engine_call = Engine.__call__

    def miscounting(self: Engine, *arguments, **options) -> list[Served]:
        first, *others = engine_call(self, *arguments, **options)
        counts = replace(first.counts, drafts=first.counts.drafts + 2)
        return [replace(first, counts=counts), *others]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__call__", miscounting)
        patch.setattr("train.distill.fit", lambda *_, **__: pytest.fail("trained again"))
        failures, _ = check_over_fitted(composed(), of_the_target, kinds=("gpt2",))
    assert any("gpt2" in line and "more than one draft apart" in line for line in failures), failures


def test_what_vllm_does_not_do_with_medusa_heads_is_told_first() -> None:
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")
    heads = random_heads(target)  # three
    settings = {"methods": ["chain_k3"], "temperatures": [0.0], "draft_sampling": ["greedy", "probabilistic"]}
    check_vllm_drafts(heads, target, settings, draft_len=3)
    for change, told in (
        ({"methods": ["chain_k3", "chain_k5"]}, r"^decode\.methods=chain_k5: 5 levels for a draft of 3 Medusa heads"),
        ({"methods": ["chain_k2"]}, r"^decode\.methods=\['chain_k2'\]: .* use \[chain_k3\]"),
        ({"temperatures": [0.0, 1.0]}, r"^decode\.draft_sampling=.*use \[greedy\]"),
    ):
        with pytest.raises(UserError, match=told):
            check_vllm_drafts(heads, target, settings | change, draft_len=3)


def test_a_run_is_compared_on_prompts_of_its_own(
    composed, engine: Engine, of_the_target: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = composed()
    folder = tmp_path / "output" / "serve-check" / "tiny-float32"
    target = load_target(cfg.target.source, dtype="fp32", device="cpu", tap_ids="default")
    answers = train.serve_drafts.own_answers(target, folder)
    run = train.serve_drafts.over_fitted("eagle3", target, answers, folder, of_the_target, overwrite=False)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"Question {i}"}) + "\n" for i in range(4)))
    settings = [
        f"run={run}", f"prompts={tmp_path / 'prompts.jsonl'}", "decode.methods=[chain_k2]", "decode.num_prompts=3",
        "decode.max_new_tokens=8",
    ]  # fmt: skip
    failures, metrics = check_run(composed(*settings), [f"run={run}"])
    assert failures == [], "our loop on the exported folder is not our loop on the run"
    ratio = metrics["served/ratio/all/T0/chain_k2"]
    assert (ratio.value, ratio.n) == (1, 3) and metrics["served/texts_apart/all/T0/chain_k2"].value == 0
    sampled = [(draft.draft_len, draft.draft_sampling) for draft in engine.drafts]
    assert sampled == [(2, "greedy"), (2, "greedy"), (2, "probabilistic")]
    written = json.loads((tmp_path / "output" / "eagle3" / "served" / "counts.json").read_text())
    assert set(written) == {"T0/chain_k2", "T1/chain_k2_greedy_draft", "T1/chain_k2"}
    assert [row["prompt"] for row in written["T0/chain_k2"]] == ["prompts/0", "prompts/1", "prompts/2"]
    results = read_results(tmp_path / "output" / "eagle3" / "results.json")
    assert results["metrics"]["served/ratio/all/T0/chain_k2"]["value"] == 1

    def deaf(self: Engine, *arguments, **options) -> list[Served]:  # accepts nothing
        return [replace(each, counts=Counts(19, 0, (0, 0))) for each in Engine.__call__(engine, *arguments, **options)]

    monkeypatch.setattr(train.serve_check, "generate", lambda *a, **o: deaf(engine, *a, **o))
    failures, _ = check_run(composed(*settings, "decode.temperatures=[0.0]"), [f"run={run}"])
    assert len(failures) == 1 and "more than 2% apart" in failures[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode.methods=[static_3x2x1]", r"decode\.methods=.*vLLM drafts chains; leave static_3x2x1 out"),
        ("decode.top_p=0.9", r"decode\.top_p=0\.9: vLLM filters the target alone"),
        ("prompts=nowhere.jsonl", r"prompts=nowhere\.jsonl: no such file"),
    ],
)
def test_mistakes_name_the_key(composed, override: str, message: str, tmp_path: Path, monkeypatch) -> None:
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu")
    pair = type("Pair", (), {"target": target, "draft": target.model, "name": "x", "run": None})
    monkeypatch.setattr(train.serve_check, "load_pair", lambda *_: pair)
    with pytest.raises(UserError, match=message):
        check_run(composed(override), [])
