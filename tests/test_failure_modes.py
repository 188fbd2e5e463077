"""Where speculation fails: the parts of failure_modes.json, their sentences and plots, and what is measured anew."""

import json

import pytest
import torch
from omegaconf import OmegaConf

import eval.failure_parts
from eval.entry import CONF_DIR
from eval.failure_modes import check_failure, run_failure_modes
from eval.failure_parts import PARTS, by_batch, by_draft_len, fitting_methods, kind_prompts, mixed
from eval.failure_view import break_even_alpha, describe, plot_part, sentences
from eval.html_report import failure_parts
from eval.prompts import Prompt
from eval.results import Metric
from eval.run import Pair
from eval.theory import expected_tokens
from models.errors import UserError
from models.medusa import build_medusa
from models.target import Target
from models.tiny import byte_tokenizer, random_model
from tests.test_loop import first_blocks

DEFAULTS = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "failure" / "default.yaml"))
SMALL = DEFAULTS | {
    "methods": ["chain_k2", "static_2x1", "lookahead_w3_n3_g2"],
    "temperatures": [0.0, 1.5],
    "draft_lens": [1, 3],
    "batch_sizes": [1, 3],
    "num_batches": 2,
    "sets": ["gsm8k", "humaneval"],
    "num_prompts": 1,
    "kind_prompts": 1,
    "prose_tokens": 20,
    "max_new_tokens": 8,
}


@pytest.fixture(scope="module")
def target():
    return Target(random_model("tiny_llama"), byte_tokenizer(), name="tiny_llama")


@pytest.fixture(scope="module")
def pair(target):
    return Pair(target, first_blocks(target.model, 7), "pair", "seven_blocks", None, None)


@pytest.fixture(scope="module")
def measured(pair, tmp_path_factory):
    root = tmp_path_factory.mktemp("outputs")
    return root, run_failure_modes(pair, SMALL, output_root=root)


# --- the file --------------------------------------------------------------------------------------------------------


def test_all_parts_stand_in_the_file_and_in_the_report(measured, pair):
    root, parts = measured
    held = json.loads((root / "pair" / "failure_modes.json").read_text())
    assert held["parts"] == parts
    assert [part["name"] for part in parts] == list(PARTS)
    assert held["target"] == pair.target_fingerprint and held["draft"] == pair.draft_fingerprint
    shown = failure_parts(root / "pair", held)
    assert len(shown) == 4
    for part in shown:
        assert part["title"] and part["sentences"] and part["data"].startswith(b"\x89PNG")


def test_every_method_is_measured_at_every_place(measured):
    places = {
        part["name"]: {tuple(key.split("/")[1:]) for key in part["metrics"] if key.startswith("speedup/")}
        for part in measured[1]
    }
    methods = SMALL["methods"]
    assert places["temperature"] == {(method, t) for method in methods for t in ("0", "1.5")}
    assert places["draft_len"] == {("chain", "1"), ("chain", "3")}
    assert places["batch"] == {("chain_k2", "1"), ("chain_k2", "3")}
    assert places["kinds"] == {(method, kind) for method in methods for kind in ("code", "maths", "chat", "prose")}
    for part in measured[1]:
        for key, metric in part["metrics"].items():
            if key.startswith("speedup/"):
                low, high = metric["ci95"]
                assert low <= metric["value"] <= high
        assert part["made_by"].keys() == {"command", "git_sha", "device", "dtype"}


def test_parts_that_are_there_are_not_measured_again(measured, pair, monkeypatch, capsys):
    root, parts = measured
    path = root / "pair" / "failure_modes.json"
    before = path.read_text()

    def refuse(*arguments):
        raise AssertionError("measured again")

    for name in PARTS:
        monkeypatch.setitem(PARTS, name, refuse)
    assert run_failure_modes(pair, SMALL, output_root=root) == parts
    assert path.read_text() == before and "measured before" in capsys.readouterr().out
    # a key of one part alone: only that part is asked for anew
    monkeypatch.setitem(PARTS, "kinds", lambda *arguments: {"speedup/chain_k2/code": Metric(2.0)})
    anew = run_failure_modes(pair, SMALL | {"prose_tokens": 21}, output_root=root)
    assert anew[:3] == parts[:3] and anew[3]["metrics"] == {
        "speedup/chain_k2/code": {"value": 2.0, "ci95": None, "n": 1}
    }
    with pytest.raises(AssertionError, match="measured again"):
        run_failure_modes(pair, SMALL, output_root=root, overwrite=True)
    path.write_text(before)


def test_a_part_is_written_before_the_next_begins(pair, tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "temperature", lambda *arguments: {"speedup/chain_k2/1": Metric(0.5, (0.4, 0.6), 2)})
    monkeypatch.setitem(PARTS, "batch", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_failure_modes(pair, SMALL | {"parts": ["temperature", "batch"]}, output_root=tmp_path)
    [part] = json.loads((tmp_path / "pair" / "failure_modes.json").read_text())["parts"]
    assert part["name"] == "temperature" and (tmp_path / "pair" / "failure_temperature.png").is_file()


def test_another_pairs_file_is_not_mixed_with_this_ones(target, pair, tmp_path, monkeypatch):
    for name in PARTS:
        monkeypatch.setitem(PARTS, name, lambda *arguments: {"speedup/chain/1": Metric(2.0)})
    of_pair = SMALL | {"parts": ["draft_len"]}
    run_failure_modes(pair, of_pair, output_root=tmp_path)
    other = Pair(target, first_blocks(target.model, 6), "pair", "six_blocks", None, None)
    with pytest.raises(UserError, match="another draft: choose another output_root, or overwrite=true"):
        run_failure_modes(other, of_pair, output_root=tmp_path)
    of_other = run_failure_modes(other, SMALL | {"parts": ["batch"]}, output_root=tmp_path, overwrite=True)
    assert [part["name"] for part in of_other] == ["batch"]
    (tmp_path / "pair" / "failure_modes.json").write_text('{"parts": []}')
    with pytest.raises(UserError, match="is no file of failure modes"):
        run_failure_modes(pair, of_pair, output_root=tmp_path)


def test_a_pair_without_a_draft_is_refused(target, tmp_path):
    with pytest.raises(UserError, match="draft=none"):
        run_failure_modes(Pair(target, None, "bare", "none", None, None), SMALL, output_root=tmp_path)


# --- what is measured ------------------------------------------------------------------------------------------------


def test_a_draft_that_is_always_right_gives_whole_rounds(target):
    """13 tokens, 12 of them in rounds: 3 rounds of 4 by chain_k3, 6 of 2 by chain_k1, whatever the batch."""
    settings = SMALL | {"methods": ["chain_k3"], "max_new_tokens": 13, "num_batches": 1}
    figures = by_batch(target, target.model, settings) | by_draft_len(target, target.model, settings)
    for where in ("chain_k3/1", "chain_k3/3", "chain/3", "chain/1"):
        assert figures[f"tau/{where}"].value == (2 if where == "chain/1" else 4)
        assert figures[f"alpha/{where}"].value == 1
    assert figures["draft_cost/chain/3"].value > figures["draft_cost/chain/1"].value
    for where in ("chain_k3/1", "chain_k3/3"):
        speedup = figures[f"spec_tokens_per_s/{where}"].value / figures[f"plain_tokens_per_s/{where}"].value
        assert figures[f"speedup/{where}"].value == pytest.approx(speedup)


def test_every_batch_size_decodes_the_same_prompts(target, monkeypatch):
    sizes, seen = [], []
    decode = eval.failure_parts.speculative_decode_batch

    def recorded(target, draft, prompts, **options):
        if options["max_new_tokens"] == SMALL["max_new_tokens"] + 1:
            sizes.append(len(prompts))
            seen.extend(map(tuple, prompts if draft is None else []))
        return decode(target, draft, prompts, **options)

    monkeypatch.setattr(eval.failure_parts, "speculative_decode_batch", recorded)
    by_batch(target, target.model, SMALL | {"max_new_tokens": SMALL["max_new_tokens"] + 1})
    assert sizes == [1] * 12 + [3] * 4  # plain and speculative: two batches of the largest size, six of the other
    assert len(set(seen[:6])) == 6 and seen[:6] == seen[6:]


def test_kinds_are_chat_prompts_and_raw_prose(target):
    prompts = kind_prompts(target, SMALL | {"kind_prompts": 2})
    assert [prompt.set_name for prompt in prompts] == [
        kind for kind in ("code", "maths", "chat", "prose") for _ in range(2)
    ]
    chat, prose = target.tokenizer.decode(prompts[4].token_ids), prompts[-1]
    assert chat.startswith("<|im_start|>user") and chat.endswith("<|im_start|>assistant\n")
    assert len(prose.token_ids) == 20 and "<|" not in prose.text
    assert target.tokenizer.decode(prose.token_ids) == prose.text


def test_medusa_drafts_no_deeper_than_it_has_heads(target, tmp_path):
    heads = build_medusa(target=target, num_heads=2, draft_vocab_size=50).eval()
    wanted = ["chain_k2", "dynamic_d2_k4_n8", "lookahead_w5_n3_g5"]
    assert fitting_methods(["chain_k3", "dynamic_d5_k4_n8", "lookahead_w5_n3_g5", "chain_k4"], heads) == wanted
    assert fitting_methods(DEFAULTS["methods"], target.model) == DEFAULTS["methods"]
    figures = by_draft_len(target, heads, SMALL | {"draft_lens": [1, 2, 3, 4]})
    assert {key for key in figures if key.startswith("tau/")} == {"tau/chain/1", "tau/chain/2"}
    pair = Pair(target, heads, "heads", "heads", None, None)
    with pytest.raises(UserError, match=r"failure\.draft_lens=\[3, 4\]: the draft has 2 Medusa heads"):
        run_failure_modes(pair, SMALL | {"draft_lens": [3, 4]}, output_root=tmp_path)
    assert not list(tmp_path.iterdir())  # before any part is measured


def test_sets_take_turns():
    prompts = [Prompt(name, str(i), "", ()) for name, count in (("a", 3), ("b", 1)) for i in range(count)]
    assert [(p.set_name, p.prompt_id) for p in mixed(prompts)] == [("a", "0"), ("b", "0"), ("a", "1"), ("a", "2")]


# --- sentences and plots ---------------------------------------------------------------------------------------------


def figures_at(where, *, speedup, tau, verify=1.2, draft=0.3, alpha=None, overhead=0.05):
    found = {"speedup": speedup, "tau": tau, "verify_cost": verify, "draft_cost": draft, "loop_overhead": overhead}
    found |= {} if alpha is None else {"alpha": alpha}
    return {f"{name}/{where}": Metric(value, (value - 0.04, value + 0.03), 4) for name, value in found.items()}


@pytest.mark.parametrize("draft_len", [1, 3, 12])
@pytest.mark.parametrize("cost", [1.0, 1.3, 1.9])
def test_at_the_break_even_alpha_tokens_equal_cost(draft_len, cost):
    assert expected_tokens(break_even_alpha(cost, draft_len), draft_len) == pytest.approx(cost, abs=1e-6)


def test_no_alpha_pays_for_a_round_dearer_than_all_its_tokens():
    assert break_even_alpha(4.0, 3) is None and break_even_alpha(3.99, 3) == pytest.approx(1, abs=0.01)


def test_a_slow_chain_is_told_with_the_alpha_it_needs():
    figures = figures_at("chain_k3/2", speedup=0.91, tau=1.25, alpha=0.2) | figures_at("chain_k3/0", speedup=1.5, tau=2)
    [told] = sentences(figures, "temperature")
    assert told.startswith(
        "chain_k3 at T = 2: 0.91x [0.87, 0.94]: slower than plain, because a round gives 1.25 tokens"
    )
    assert (
        "costs 1.50 plain steps (1.20 to verify, 0.30 to draft): alpha is 0.20, and K = 3 needs more than 0.34" in told
    )


@pytest.mark.parametrize(
    ("where", "part", "options", "told"),
    [
        ("dynamic_d5_k4_n8/prose", "kinds", {"tau": 1.2}, "dynamic_d5_k4_n8 on prose: 0.90x"),
        ("chain/12", "draft_len", {"tau": 2, "draft": 13, "alpha": 0.5}, "more than its 13 tokens at best"),
        ("chain/2", "draft_len", {"tau": 1.45, "alpha": 0.6}, "alpha 0.60 would do"),
        ("chain_k3/32", "batch", {"tau": 1.8, "alpha": 0.5}, "rows of a batch wait for the slowest"),
        ("chain_k3/1", "temperature", {"tau": 1.8, "alpha": 0.5}, "prefill and the loop's own work (5%) eat it"),
    ],
)
def test_reasons(where, part, options, told):
    [sentence] = sentences(figures_at(where, speedup=0.9, **options), part)
    assert told in sentence and describe(where, part) in sentence


def test_a_doubtful_loss_says_so_and_gains_say_the_least():
    [doubtful] = sentences(figures_at("chain_k3/1", speedup=0.98, tau=1.4, alpha=0.3), "temperature")
    assert "(or not: the interval reaches above 1)" in doubtful
    gains = figures_at("chain_k3/4", speedup=1.2, tau=2) | figures_at("chain_k3/1", speedup=1.5, tau=2)
    assert sentences(gains, "batch") == [
        "nowhere slower than plain; the least gain is that of chain_k3 at batch size 4: 1.20x [1.16, 1.23]"
    ]


def test_texts_of_one_token_have_no_rounds_to_judge():
    assert "no rounds" in sentences({"speedup/chain_k3/1": Metric(0.9)}, "temperature")[0]


def test_a_plot_has_a_line_for_each_method_and_shades_what_is_slower(measured, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("eval.failure_view.write_figure", lambda figure, path: drawn.append(figure) or path)
    for part in measured[1]:
        plot_part(part, tmp_path / part["png"], title="a title")
    legends = [{text.get_text() for text in figure.legends[0].get_texts()} for figure in drawn]
    assert {*SMALL["methods"], "slower than plain"} == legends[0] == legends[3]
    assert {"chain_k2", "plain", "slower than plain", "tokens a round gives"} < legends[2]
    assert "T = 1.5" in {text.get_text() for text in drawn[0].axes[0].texts}
    ticks = [label.get_text() for label in drawn[2].axes[0].get_xticklabels()]
    assert ticks == ["1", "3"] and "a title: by batch size" in drawn[2].get_suptitle()


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"parts": ["temperature", "weather"]}, "failure.parts=weather: unknown part; use temperature"),
        ({"methods": ["chain"]}, "failure.methods=chain: no such method"),
        ({"methods": ["static_2x1"]}, "failure.methods=.*batches need a chain"),
        ({"sets": ["moon"]}, "failure.sets=moon: no such set"),
    ],
)
def test_mistakes_name_their_key(change, told):
    check_failure(SMALL)
    with pytest.raises(UserError, match=told):
        check_failure(SMALL | change)


def test_a_tree_wider_than_the_vocabulary_is_refused_before_anything_is_measured(pair, tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "temperature", lambda *arguments: 1 / 0)
    with pytest.raises(UserError, match=r"^failure\.methods=static_300: 300 children for a draft of \d+ ids"):
        run_failure_modes(pair, SMALL | {"methods": ["chain_k2", "static_300"]}, output_root=tmp_path)


def test_answers_that_no_position_is_left_for(target, pair):
    with pytest.raises(UserError, match=r"failure\.max_new_tokens=1024: no prompt leaves room"):
        by_draft_len(target, pair.draft, SMALL | {"max_new_tokens": 1024})


def test_default_methods_are_methods():
    check_failure(DEFAULTS)
    assert torch.tensor(DEFAULTS["temperatures"]).diff().min() > 0 and 1.5 in DEFAULTS["temperatures"]
