"""What stands between our loop and vLLM, without vLLM: counts, the client's arithmetic, /metrics, the rules."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train.serving
from eval.loop import DecodeResult, Round, speculative_decode
from eval.measures import Method
from eval.prompts import Prompt
from eval.tree import TreeShape
from models.drafts import gpt2_draft
from models.eagle import build_eagle
from models.errors import UserError
from models.target import Target, load_target
from models.tiny import random_model
from train.serve_rules import compare, judge, narrowest_draft_gap, ratio_of_means, text_difference
from train.serving import CLIENT, Counts, Draft, Served, ServingError, check_installed, generate, parse_counters

PROMPTS = [Prompt("set", str(i), "", tuple(range(40 + i, 60 + i))) for i in range(3)]
GREEDY = Method(0.0, "chain_k3", TreeShape.chain(3), "probabilistic")
SAMPLED = Method(1.0, "chain_k3", TreeShape.chain(3), "probabilistic")

FAKE_VLLM = '''
"""As much of vLLM as the client touches: every prompt drafts and accepts by its length, totals grow."""
import json, os, torch
from pathlib import Path
from vllm.v1.sample import rejection_sampler

class Metric:
    def __init__(self, name, value):
        self.name = "vllm:" + name
        setattr(self, "values" if isinstance(value, list) else "value", value)

class SamplingParams:
    def __init__(self, **options): self.options = options

class LLM:
    def __init__(self, **options):
        temperatures, ends = torch.tensor([0.7, -1.0]), torch.tensor([2, 5])
        expanded = rejection_sampler.expand_batch_to_tokens(temperatures, ends, 5, replace_from=-1, replace_to=1)
        Path(os.environ["FAKE_LOG"]).write_text(json.dumps(options | {"expanded": expanded.tolist()}))
        if options["model"] == "broken": raise ValueError("no such architecture")
        self.spec = options["speculative_config"]
        self.totals = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "accepted_tokens_per_pos": [0, 0]}
    def get_metrics(self):
        if not self.spec: return [Metric("num_requests", 1)]
        return [Metric(f"spec_decode_num_{name}", value) for name, value in self.totals.items()]
    def generate(self, prompts, params, use_tqdm):
        n = len(prompts[0]["prompt_token_ids"])
        self.totals["drafts"] += n
        self.totals["draft_tokens"] += 2 * n
        self.totals["accepted_tokens"] += n + 1
        per = self.totals["accepted_tokens_per_pos"]
        self.totals["accepted_tokens_per_pos"] = [per[0] + n, per[1] + 1]
        length = params.options["max_tokens"]
        text = type("Text", (), {"token_ids": tuple(range(length))})
        return [type("Output", (), {"outputs": [text]})] * len(prompts)
'''


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package called vllm for the client, which then runs in our own environment; the file its options go to."""
    files = {
        "__init__.py": FAKE_VLLM,
        "platforms.py": "class current_platform:\n    is_cpu = staticmethod(lambda: True)\n",
        "v1/sample/rejection_sampler.py": "def expand_batch_to_tokens(x, *args, **options): return x * 0\n",
    }
    for name, text in files.items():
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "options.json"))
    monkeypatch.setattr(train.serving, "VLLM_PYTHON", Path(sys.executable))
    return tmp_path / "options.json"


def test_counts_are_taken_before_any_cut() -> None:
    rounds = [Round(3, 3, 3, 3, 3), Round(3, 1, 0, 0, 3), Round(3, 1, 1, 2, 3), Round(0, 0, 0, 0, 0)]
    counts = Counts.of(DecodeResult([0] * 9, [0] * 9, "length", rounds=rounds), 3)
    assert counts == Counts(3, 5, (2, 2, 1))
    assert counts.mean_length == pytest.approx(1 + 5 / 3)
    assert counts + counts == Counts(6, 10, (4, 4, 2))


def test_each_prompt_has_its_own_counters(fake_vllm: Path, tmp_path: Path) -> None:
    draft = Draft(Path("head"), "eagle3", 2, "probabilistic")
    served = generate(
        "target", [[1, 2, 3], [4]], dtype=torch.bfloat16, max_model_len=99, draft=draft, max_new_tokens=5,
        stop_ids=[2], log=tmp_path / "log",
    )  # fmt: skip
    assert served == [Served([0, 1, 2, 3, 4], Counts(3, 4, (3, 1))), Served([0, 1, 2, 3, 4], Counts(1, 2, (1, 1)))]
    options = json.loads(fake_vllm.read_text())
    assert options["speculative_config"] == {
        "method": "eagle3", "model": "head", "num_speculative_tokens": 2, "draft_sample_method": "probabilistic"
    }  # fmt: skip
    assert options["dtype"] == "bfloat16" and options["disable_log_stats"] is False and options["enforce_eager"]
    assert options["expanded"] == pytest.approx([0.7, 0.7, 1, 1, 1]), (
        "the client mends the temperatures of drafted tokens"
    )
    [plain] = generate("target", [[1]], dtype=torch.float32, max_model_len=9, max_new_tokens=1, log=tmp_path / "log")
    assert plain == Served([0], Counts(0, 0, ()))


def test_a_failing_engine_is_told_with_the_end_of_its_log(fake_vllm: Path, tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"exit code 1.*\n(.*\n)*ValueError: no such architecture"):
        generate("broken", [[1]], dtype=torch.float32, max_model_len=9, log=tmp_path / "log")


def test_the_client_imports_nothing_of_ours() -> None:
    code = f"import runpy, sys; runpy.run_path({str(CLIENT)!r}); print([m for m in sys.modules if m in {OURS}])"
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


OURS = ("models", "data", "eval", "train", "torch")


def test_without_vllm_the_line_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train.serving, "VLLM_PYTHON", tmp_path / ".venv-vllm" / "bin" / "python")
    with pytest.raises(UserError, match=r"\.venv-vllm: .*make setup-vllm"):
        check_installed()


def test_counters_are_read_from_metrics() -> None:
    labels = '{engine="0",model_name="target"'
    text = "\n".join(
        [
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f"vllm:spec_decode_num_drafts_total{labels}}} 21.0",
            f"vllm:spec_decode_num_drafts_created{labels}}} 1.7e+09",
            f"vllm:spec_decode_num_accepted_tokens_total{labels}}} 40.0",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{labels},position="0"}} 20.0',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{labels},position="1"}} 12.0',
        ]
    )
    assert parse_counters(text, 2) == Counts(21, 40, (20, 12))
    with pytest.raises(ServingError, match="0 lines of spec_decode_num_accepted_tokens_per_pos_total"):
        parse_counters(text, 3)


# --- the rules: our own loop plays vLLM's part --------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


@pytest.fixture(scope="module")
def ours(target: Target) -> list[DecodeResult]:
    """Of a draft that agrees now and then: the target's own weights, disturbed."""
    draft = random_model("tiny_llama")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return [
        speculative_decode(target, draft, p.token_ids, draft_len=3, max_new_tokens=24, eos_token_ids=())
        for p in PROMPTS
    ]


def as_served(results: list[DecodeResult]) -> list[Served]:
    return [Served(list(r.token_ids), Counts.of(r, 3)) for r in results]


def more(served: list[Served], drafts: int, accepted: int = 0) -> list[Served]:
    counts = served[1].counts
    counts = replace(counts, drafts=counts.drafts + drafts, accepted=counts.accepted + accepted)
    return [served[0], replace(served[1], counts=counts), *served[2:]]


def verdict(target: Target, ours: list[DecodeResult], served: list[Served], gap: float = 9.0):
    return judge("x", target, PROMPTS, ours, served, draft_len=3, draft_gap=lambda prompt: gap)


def test_equal_is_equal(target: Target, ours: list[DecodeResult]) -> None:
    judged = verdict(target, ours, as_served(ours))
    assert judged.verdict == "equal" and judged.ours == judged.served and judged.ours.accepted > 0


def test_one_draft_apart_needs_a_near_tie(target: Target, ours: list[DecodeResult]) -> None:
    served = more(as_served(ours), 1)
    without, with_tie = verdict(target, ours, served), verdict(target, ours, served, gap=1e-5)
    assert without.verdict == "UNEQUAL" and "set/1" in without.failures[0] and "9.000" in without.failures[0]
    assert with_tie.verdict == "near tie" and "gap of the draft 0.000" in with_tie.notes[0]


@pytest.mark.parametrize(("drafts", "accepted"), [(2, 0), (0, 4)])
def test_no_near_tie_explains_more(target: Target, ours: list[DecodeResult], drafts: int, accepted: int) -> None:
    judged = verdict(target, ours, more(as_served(ours), drafts, accepted), gap=0.0)
    assert judged.verdict == "UNEQUAL" and "apart" in judged.failures[0]


def test_a_wrong_token_and_a_short_text_are_failures(target: Target, ours: list[DecodeResult]) -> None:
    served = as_served(ours)
    wrong = [*served[0].token_ids]
    wrong[5] = (wrong[5] + 1) % target.vocab_size
    judged = verdict(target, ours, [replace(served[0], token_ids=wrong), *served[1:]])
    assert judged.verdict == "UNEQUAL" and "parts at token 5" in judged.failures[0]
    short = text_difference(target, PROMPTS[0], ours[0].token_ids, ours[0].token_ids[:-1])
    assert short.is_failure and short.index == len(ours[0].token_ids) - 1


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "gpt2"])
def test_the_drafts_narrowest_gap_is_that_of_its_own_logits(target: Target, kind: str) -> None:
    if kind == "gpt2":
        draft = gpt2_draft(target.vocab_size, n_layer=1, n_head=2, n_embd=32).eval()
    else:
        draft = build_eagle(target=target, kind=kind, draft_vocab_size=100 if kind == "eagle3" else None).eval()
    options = {"draft_len": 2, "max_new_tokens": 4, "eos_token_ids": ()}
    gap = narrowest_draft_gap(target, draft, PROMPTS[0], **options)
    assert 0 < gap < 10
    assert narrowest_draft_gap(target, draft, PROMPTS[0], **options) == gap, "recording changed the draft"


def test_greedy_lengths_must_agree_within_two_percent(target: Target, ours: list[DecodeResult]) -> None:
    metrics, notes, failures = compare(GREEDY, target, PROMPTS, ours, as_served(ours))
    assert not failures and not notes
    assert metrics["served/ratio/all/T0/chain_k3"].value == 1
    assert metrics["served/texts_apart/all/T0/chain_k3"].value == 0
    tau = metrics["served/tau_ours/all/T0/chain_k3"]
    counts = [Counts.of(result, 3) for result in ours]
    assert tau.value == pytest.approx(1 + sum(c.accepted for c in counts) / sum(c.drafts for c in counts))
    total = sum(c.drafts for c in counts)
    _, _, failures = compare(GREEDY, target, PROMPTS, ours, more(as_served(ours), 0, total // 4))
    assert len(failures) == 1 and "more than 2% apart" in failures[0]


def test_sampled_lengths_must_agree_within_chance(target: Target) -> None:
    """Many prompts of noisy counts: the same distribution passes, one of shorter lengths does not."""
    generator = torch.Generator().manual_seed(0)

    def draw(chance: float) -> list[Round]:
        accepted = (torch.rand(20, 3, generator=generator) < chance).int().cumprod(1).sum(1).tolist()
        return [Round(3, min(n + 1, 3), n, n, 3) for n in accepted]

    def results(chance: float) -> list[DecodeResult]:
        return [DecodeResult([0], [0], "length", rounds=draw(chance)) for _ in range(40)]

    prompts = [PROMPTS[0]] * 40
    own = results(0.6)
    assert not compare(SAMPLED, target, prompts, own, as_served(results(0.6)))[2]
    [failure] = compare(SAMPLED, target, prompts, own, as_served(results(0.4)))[2]
    assert "99.9 % interval" in failure


def test_a_ratio_of_equal_counts_has_no_width() -> None:
    counts = [Counts(5, 7, (4, 2, 1)), Counts(3, 9, (3, 3, 3))]
    metric = ratio_of_means(counts, counts, level=0.95)
    assert (metric.value, *metric.ci95) == (1, 1, 1)
