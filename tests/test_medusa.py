"""Medusa heads: what they begin as, training against decoding, exact texts, saving, exporting, the whole job."""

# ruff: noqa: F811 (cache_root is a fixture of test_distill)

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from test_distill import TINY, cache_root, run, run_into_a_crash  # noqa: F401
from torch.nn import functional as F

from data.datamodule import Item, PackedDataModule, PackedRows
from data.rows import Rows
from data.signals import SignalSpec
from eval.alpha import evaluate_alpha, token_alpha
from eval.decode import decode_trials, prompt_seed
from eval.drafters import make_drafter
from eval.entry import CONF_DIR
from eval.loop import speculative_decode
from eval.measures import decode_metrics
from eval.medusa_drafter import MedusaDrafter
from eval.plots import read_metrics_csv
from eval.prompts import Prompt
from eval.reference import joint_probs, reference_probs
from eval.run import load_for, load_pair
from eval.tree import TreeShape
from models.errors import UserError
from models.export import export
from models.medusa import MedusaHeads, build_medusa, is_medusa_folder, load_medusa
from models.reload import largest_difference, probe_logits, read_folder
from models.sampling import SamplingParams, filtered_probs
from models.servable import kind_of, servable, unservable_lines
from models.serve_command import serve_command
from models.target import Target, load_target
from tests.exact_loop import PROMPT, loop_counts
from tests.test_eagle import chat_rows
from tests.test_loop import prompts
from tests.test_tree_drafters import _five_ids, random_head
from tests.test_verification import chi_square_p_value
from train.export import export_run
from train.losses import LossSpec
from train.medusa_module import MedusaDistiller
from train.module import OptimSpec, make_optimizer

METHODS = ["chain_k3", "static_3x2x1", "dynamic_d3_k3_n8"]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("random:tiny_llama", dtype="fp32", device="cpu")


def random_heads(target: Target, num_heads: int = 3, draft_vocab: torch.Tensor | None = None, **options) -> MedusaHeads:
    """Heads that differ, over a part of the ids."""
    if draft_vocab is None:
        draft_vocab = torch.arange(0, 100) * 2 + 3
    heads = build_medusa(
        target=target, num_heads=num_heads, draft_vocab_size=len(draft_vocab), draft_vocab=draft_vocab, **options
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
    return heads.eval()


def distiller(target: Target, heads: MedusaHeads, **options) -> MedusaDistiller:
    return MedusaDistiller(
        heads,
        vocab_size=target.vocab_size,
        loss=options.pop("loss", LossSpec()),
        optim=OptimSpec(lr=3e-3),
        signal=SignalSpec("hidden"),
        total_steps=10,
        target=target,
        metrics_every=0,
        **options,
    )


# --- the heads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["random:tiny_llama", "random:tiny_gpt2"])
def test_at_first_every_head_says_what_the_target_says(source: str) -> None:
    target = load_target(source, dtype="fp32", device="cpu")
    ids = torch.arange(40, 120)
    heads = build_medusa(target=target, num_heads=3, num_layers=2, draft_vocab_size=80, draft_vocab=ids)
    hidden = torch.randn(5, target.hidden_size)
    logits = heads.logits(heads(hidden))
    assert logits.shape == (3, 5, 80) and torch.equal(heads.target_ids(torch.arange(80)), ids)
    for each in logits:
        torch.testing.assert_close(each, target.logits(hidden)[:, ids])


def test_a_saved_folder_is_the_same_heads_under_vllms_names(target: Target, tmp_path: Path) -> None:
    heads = random_heads(target, 2, num_layers=2)
    heads.save_pretrained(tmp_path)
    config, state = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config == {
        "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 2, "hidden_size": 64, "vocab_size": 259,
        "truncated_vocab_size": 100, "num_hidden_layers": 2, "medusa_fc_bias": False, "torch_dtype": "float32",
    }  # fmt: skip
    layers = {f"blocks.{h}.layers.{i}.weight" for h in range(2) for i in range(2)}
    assert state.keys() == layers | {"lm_heads.0.weight", "lm_heads.1.weight", "token_map"}
    assert is_medusa_folder(tmp_path) and not is_medusa_folder(tmp_path / "nothing")
    again, hidden = load_medusa(tmp_path, target), torch.randn(4, 64)
    assert torch.equal(again.draft_vocab, heads.draft_vocab) and again.config == heads.config
    assert torch.equal(again.logits(again(hidden)), heads.logits(heads(hidden)))
    further = build_medusa(target=target, num_heads=2, num_layers=2, draft_vocab_size=100, init=str(tmp_path))
    assert further.training and torch.equal(further.lm_heads[1].weight, heads.lm_heads[1].weight)


def test_a_strict_load_names_what_is_wrong(target: Target, tmp_path: Path) -> None:
    random_heads(target).save_pretrained(tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    content = json.loads((tmp_path / "config.json").read_text())

    def refused(message: str, state: dict = good, **config) -> None:
        save_file(state, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({**content, **config}))
        with pytest.raises(UserError, match=message) as caught:
            load_medusa(tmp_path, target)
        assert "\n" not in str(caught.value)

    refused(
        r"tensor blocks\.0\.layers\.0\.bias is missing or unknown",
        {**good, "blocks.0.layers.0.bias": torch.zeros(64)},
    )
    refused(r"tensor lm_heads\.2\.weight is missing", {k: v for k, v in good.items() if k != "lm_heads.2.weight"})
    refused(r"size mismatch", {**good, "lm_heads.0.weight": good["lm_heads.0.weight"][:50].clone()})
    refused(r"token_map is no ascending list", {**good, "token_map": good["token_map"].flip(0)})
    refused(r"cannot be read as Medusa heads", num_heads="many")
    refused(r"vocabulary 300, this one has 259", vocab_size=300)
    other = {k: v for k, v in good.items() if "layers" not in k and "lm_heads" not in k}
    wide = {f"blocks.{h}.layers.0.weight": torch.zeros(32, 32) for h in range(3)}
    wide |= {f"lm_heads.{h}.weight": torch.zeros(100, 32) for h in range(3)}
    refused(r"hidden size 32, this one has 64", {**other, **wide}, hidden_size=32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 260}, r"draft\.draft_vocab_size=260: the target has 259 ids"),
        ({"init": "nowhere"}, r"draft\.init=nowhere: no Medusa heads there"),
        ({"kind": "hydra"}, r"draft\.kind=hydra"),
    ],
)
def test_mistakes_name_the_key(target: Target, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_medusa(target=target, **{"draft_vocab_size": 100, **options})


def test_heads_of_another_shape_are_no_start(target: Target, tmp_path: Path) -> None:
    random_heads(target).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"their num_heads is 3 and this draft's 4"):
        build_medusa(target=target, draft_vocab_size=100, init=str(tmp_path))


def test_padded_ids_leave_heads_made_elsewhere(tmp_path: Path) -> None:
    """A folder over the whole width of a target whose last ids stand for no token."""
    padded = load_target("random:tiny_llama", dtype="fp32", device="cpu")
    wide = build_medusa(target=padded, num_heads=2, draft_vocab_size=None)
    wide.save_pretrained(tmp_path)
    assert "token_map" not in load_file(tmp_path / "model.safetensors")
    padded.vocab_size = 250
    narrow, hidden = load_medusa(tmp_path, padded), torch.randn(3, 64)
    assert narrow.draft_vocab.tolist() == list(range(250)) and narrow.config.truncated_vocab_size == 250
    torch.testing.assert_close(narrow.logits(narrow(hidden)), wide.logits(wide(hidden))[..., :250])
    speculative_decode(padded, narrow, prompts(1)[0], method="chain_k2", max_new_tokens=8, eos_token_ids=())


# --- training --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def by_hand(target: Target, heads: MedusaHeads, rows: Rows) -> tuple[list[float], list[float], list[int]]:
    """KL over the draft vocabulary, alpha and counts of every head, slot by slot."""
    num_heads, ids_of = heads.config.num_heads, heads.draft_vocab
    kl, alpha, counts = [0.0] * num_heads, [0.0] * num_heads, [0] * num_heads
    for i in range(len(rows)):
        ids, mask = (np.array(x) for x in rows.row(i))
        hidden = target.states(torch.from_numpy(ids)[None].long()).final_hidden[0]
        for p in range(len(ids)):
            for k in range(1, num_heads + 1):
                if p + 1 + k < len(ids) and mask[p + 1 : p + 2 + k].all():
                    full = target.logits(hidden[p + k])[None]  # what x[p+1+k] is drawn from
                    logits = heads.logits(heads(hidden[p]))[k - 1][None]
                    log_p, log_q = full[:, ids_of].log_softmax(-1), logits.log_softmax(-1)
                    kl[k - 1] += float((log_p.exp() * (log_p - log_q)).sum())
                    alpha[k - 1] += float(token_alpha(full, logits, draft_ids=ids_of))
                    counts[k - 1] += 1
    return kl, alpha, counts


@torch.no_grad()
def test_the_loss_of_every_head_is_that_by_hand(target: Target) -> None:
    rows, heads = chat_rows(6), random_heads(target)
    kl, alpha, counts = by_hand(target, heads, rows)
    module = distiller(target, heads, decay=0.5)
    out = module.distill(PackedRows(rows)[Item(np.arange(6))], module.specs["held_out"])
    assert out.sums.counts.tolist() == counts and counts[0] > counts[1] > counts[2] > 0
    torch.testing.assert_close(out.sums.loss, torch.tensor(kl), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(out.sums.alpha, torch.tensor(alpha), rtol=1e-4, atol=1e-3)
    expected = sum(0.5**k * kl[k] / counts[k] for k in range(3))
    assert out.loss_sum.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["forward_kl", "lk_hybrid"])
def test_gradients_are_those_of_the_plain_formula(target: Target, name: str) -> None:
    rows, heads = chat_rows(4), random_heads(target).train()
    module = distiller(target, heads, loss=LossSpec(name))
    batch = module.with_columns(PackedRows(rows)[Item(np.arange(4))], module.specs["train"])
    module.distill(batch, module.specs["train"]).loss_sum.backward()
    ours = {key: p.grad.clone() for key, p in heads.named_parameters()}
    heads.zero_grad()
    loss = 0.0
    for k in range(1, 4):
        terms = []
        for start, end in itertools.pairwise(batch["row_offsets"].tolist()):
            for p in range(start, end - 1 - k):
                if batch["pred_mask"][p : p + 1 + k].all():
                    log_q = heads.logits(heads(batch["final_hidden"][p]))[k - 1].log_softmax(-1)
                    full = target.logits(batch["final_hidden"][p + k].float())
                    p_full, log_p = full.softmax(-1)[heads.draft_vocab], full[heads.draft_vocab].log_softmax(-1)
                    value = (log_p.exp() * (log_p - log_q)).sum()
                    if name == "lk_hybrid":
                        alpha = torch.minimum(log_q.exp(), p_full).sum()
                        weight = torch.exp(-3 * alpha).detach()
                        value = weight * value + (1 - weight) * (1 - alpha)
                    terms.append(value)
        loss = loss + 0.8 ** (k - 1) * torch.stack(terms).mean()
    loss.backward()
    for key, parameter in heads.named_parameters():
        torch.testing.assert_close(
            ours[key], parameter.grad, rtol=1e-3, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_the_loss_is_a_mean_over_the_window_however_it_is_split(target: Target) -> None:
    rows = chat_rows()
    data = PackedDataModule(rows, batch_tokens=120, accumulate=2, simulated_steps=3)
    items = list(data.train_dataloader())[:2]
    whole = PackedRows(rows)[Item(torch.cat([b["row_ids"] for b in items]).numpy())]
    grads = []
    for batches in (items, [whole]):
        heads = random_heads(target).train()
        module = distiller(target, heads)
        for batch in batches:
            module.distill(batch, module.specs["train"]).loss_sum.backward()
        grads.append([p.grad for p in heads.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5 * b.abs().max().item() + 1e-7)


def test_a_batch_that_does_not_count_gives_zero(target: Target) -> None:
    heads = build_medusa(target=target, draft_vocab_size=100)
    module = distiller(target, heads)
    loss = module.distill(PackedRows(chat_rows())[Item(np.arange(3), counts=False)], module.specs["train"]).loss_sum
    loss.backward()
    assert loss.item() == 0 and all(p.grad.abs().sum() == 0 for p in heads.parameters())


def test_muon_has_the_blocks_and_adamw_the_vocabulary(target: Target) -> None:
    heads = build_medusa(target=target, draft_vocab_size=100)
    muon, adamw = make_optimizer(heads, OptimSpec(lr=1e-3, muon_lr=1e-3)).param_groups
    assert {p.shape for p in muon["params"]} == {(64, 64)} and {p.shape for p in adamw["params"]} == {(100, 64)}
    assert len(muon["params"]) == len(adamw["params"]) == 4


@pytest.mark.parametrize("source", ["random:tiny_llama", "random:tiny_gpt2"])
def test_over_fitted_to_an_answer_every_draft_is_accepted(source: str) -> None:
    """A slot off by one, between training and decoding, would show at once."""
    target = load_target(source, dtype="fp32", device="cpu")
    prompt = list(b"Tell me about whales.")
    plain = speculative_decode(target, None, prompt, temperature=0, max_new_tokens=40, eos_token_ids=())
    ids = np.array(prompt + plain.token_ids, dtype=np.int32)
    rows = Rows(ids, np.arange(len(ids)) >= len(prompt), np.array([0, len(ids)]), np.array([0]))
    heads = build_medusa(target=target, draft_vocab_size=None)
    module = distiller(target, heads)
    batch = module.with_columns(PackedRows(rows)[Item(np.arange(1))], module.specs["train"])
    optimizer = make_optimizer(heads, OptimSpec(lr=2e-2, weight_decay=0.0))
    for i in range(300):
        for group in optimizer.param_groups:
            group["lr"] = 2e-2 * (1 - i / 300)
        optimizer.zero_grad()
        module.distill(batch, module.specs["train"]).loss_sum.backward()
        optimizer.step()
    with torch.no_grad():
        sums = module.distill(batch, module.specs["train"]).sums
    assert torch.equal(sums.hits.long(), sums.counts), (sums.hits, sums.counts)
    for method in ("chain_k4", "static_2x1x1x1", "dynamic_d4_k2_n14"):
        result = speculative_decode(
            target, heads.eval(), prompt, method=method, temperature=0, max_new_tokens=36, eos_token_ids=()
        )
        assert result.token_ids == plain.token_ids[:36]
        assert [r.accepted_uncut for r in result.rounds] == [4] * len(result.rounds), (method, result.rounds)


def test_expected_alpha_is_that_of_the_first_head(target: Target) -> None:
    rows, heads = chat_rows(5), random_heads(target)
    metrics = evaluate_alpha(target, heads, rows, temperatures=[0.0, 1.0], max_tokens=None, position_buckets=[])
    _, alpha, counts = by_hand(target, heads, rows)
    assert metrics["alpha_tokens/held_out"].value == counts[0]
    assert metrics["alpha_expected/held_out/T1"].value == pytest.approx(alpha[0] / counts[0], abs=1e-4)


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@torch.inference_mode()
def test_the_loop_drafts_what_training_saw_at_every_slot(
    target: Target, name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind every sequence, whatever was accepted: the heads' logits at the token before the root, read anew."""
    heads, params, shape = random_heads(target), SamplingParams(temperature), TreeShape.parse(name)
    trees = []

    class Recorded(MedusaDrafter):
        def propose(self, sequence, depth):
            trees.append((sequence.tolist(), super().propose(sequence, depth)))
            return trees[-1][1]

    drafter = Recorded(heads, shape, vocab_size=target.vocab_size, params=params)
    result = speculative_decode(
        target, drafter, prompts(1)[0], temperature=temperature, max_new_tokens=24, eos_token_ids=()
    )
    assert len(trees) > 6 and (result.tau > 1 or temperature == 0)
    for sequence, tree in trees:
        hidden = target.states(torch.tensor([sequence])).final_hidden[0, -2]
        logits = heads.logits(heads(hidden))  # (K, Vd)
        for depth in range(1, 4):
            here = tree.tokens[tree.depth == depth]
            if shape.kind == "chain" and temperature:
                expected = torch.zeros(target.vocab_size)
                expected[heads.draft_vocab] = filtered_probs(logits[depth - 1], params)
                torch.testing.assert_close(tree.probs[depth - 1], expected, atol=1e-5, rtol=1e-3)
                continue
            best = heads.draft_vocab[logits[depth - 1].topk(max(1, len(set(here.tolist())))).indices]
            assert set(here.tolist()) == (set(best.tolist()) if len(here) else set())
        if shape.kind == "static":
            assert torch.bincount(tree.depth)[1:].tolist() == [3, 6, 6]


def test_the_share_of_the_draft_vocabulary_in_the_plain_text(target: Target) -> None:
    """Of the methods that the heads draft for, above all: no more than that can be accepted."""
    prompt = Prompt("s", "0", "", tuple(prompts(1)[0]))
    options = {"temperatures": [1.0], "max_new_tokens": 16}
    plain = speculative_decode(
        target, None, prompt.token_ids, temperature=1.0, max_new_tokens=16, seed=prompt_seed(prompt, 0)
    ).token_ids
    ids = torch.tensor(sorted({*plain[: len(plain) // 2], 7}))
    heads = random_heads(target, draft_vocab=ids)
    trials = decode_trials(target, heads, [prompt], methods=["chain_k2", "ngram_n2_k2"], **options)
    shares = [
        decode_metrics(of_method, shape=method.shape, suffix="s").get("draft_vocab_share/s")
        for method, of_method in trials.items()
    ]
    expected = sum(token in ids for token in plain) / len(plain)
    assert shares[0].value == expected and 0 < expected < 1 and shares[1] is None
    whole = decode_trials(target, random_head(target, "eagle1"), [prompt], methods=["chain_k2"], **options)
    assert [trial.plain_draftable for of_method in whole.values() for trial in of_method] == [16]
    whole = decode_trials(target, target.model, [prompt], methods=["chain_k2"], **options)
    assert [trial.plain_draftable for of_method in whole.values() for trial in of_method] == [None]


def test_a_dynamic_tree_keeps_the_most_probable_nodes(target: Target) -> None:
    """Against all paths: a node's probability is the product of its own and its ancestors' heads'."""
    heads, shape = random_heads(target), TreeShape.parse("dynamic_d3_k4_n10")
    drafter = MedusaDrafter(heads, shape, vocab_size=target.vocab_size, params=SamplingParams(1.0))
    record = speculative_decode(
        target, drafter, prompts(1)[0], temperature=1.0, max_new_tokens=4, eos_token_ids=(), record_trees=1
    )
    (tree,), start = record.trees, record.trees[0].start
    sequence = [*prompts(1)[0], *record.token_ids[:start]]
    with torch.no_grad():
        hidden = target.states(torch.tensor([sequence])).final_hidden[0, -2]
        logprobs = heads.logits(heads(hidden)).log_softmax(-1)  # (K, Vd)
    best = [[(float(p), int(heads.draft_vocab[i])) for p, i in zip(*head.topk(4))] for head in logprobs]
    paths = {(t,): p for p, t in best[0]}
    paths |= {(t, u): p + q for (p, t), (q, u) in itertools.product(best[0], best[1])}
    paths |= {(t, u, v): p + q + r for (p, t), (q, u), (r, v) in itertools.product(*best)}
    expected = sorted(paths, key=lambda path: -paths[path])[:10]
    found = set()
    for node in range(len(tree.tokens)):
        path = []
        while node >= 0:
            path.insert(0, tree.tokens[node])
            node = tree.parents[node]
        found.add(tuple(path))
    assert found == set(expected)


@pytest.mark.parametrize("name", METHODS)
def test_greedy_equals_plain_greedy(target: Target, name: str) -> None:
    heads, options = random_heads(target), {"max_new_tokens": 24, "eos_token_ids": ()}
    for prompt in prompts(2):
        ours = speculative_decode(target, heads, prompt, method=name, **options)
        assert ours.token_ids == speculative_decode(target, None, prompt, **options).token_ids
        assert all(0 < r.drafted <= TreeShape.parse(name).num_nodes for r in ours.rounds)


EXACT_CASES = [
    ("chain_k2", {"temperature": 0.7}, "probabilistic"),
    ("chain_k2", {"temperature": 1.0, "top_p": 0.9}, "probabilistic"),
    ("chain_k2", {"temperature": 1.5}, "greedy"),
    ("static_2x2", {"temperature": 1.0}, "greedy"),
    ("static_3x1", {"temperature": 1.5}, "greedy"),
    ("dynamic_d2_k2_n4", {"temperature": 0.7, "top_p": 0.9}, "greedy"),
]


def five_ids() -> tuple[Target, MedusaHeads]:
    target = _five_ids()[0]
    return target, random_heads(target, 2, torch.tensor([0, 1, 3, 4]))


def exact_joint(target: Target, filters: dict) -> np.ndarray:  # (125,)
    pairs = list(itertools.product(range(5), repeat=2))
    logits = target.model(torch.tensor([[*PROMPT, *pair] for pair in pairs])).logits[:, 1:].numpy()  # (25, 3, V)
    row = {pair[:n]: logits[i, n] for i, pair in enumerate(pairs) for n in range(3)}
    return joint_probs(lambda prefix: reference_probs(row[prefix], **filters), 3, 5).reshape(-1)


@pytest.mark.parametrize(("name", "filters", "draft_sampling"), EXACT_CASES)
@torch.inference_mode()
def test_the_loop_is_exact(name: str, filters: dict, draft_sampling: str) -> None:
    target, heads = five_ids()
    shape, params = TreeShape.parse(name), SamplingParams(**filters)
    drafter = make_drafter(heads, shape, vocab_size=5, params=params, draft_sampling=draft_sampling)
    counts = loop_counts(target, drafter, shape, params, 1_500, num_tokens=3, vocab_size=5)
    assert chi_square_p_value(counts, exact_joint(target, filters)) > 0.01 / len(EXACT_CASES)


@torch.inference_mode()
def test_a_wrong_declaration_is_not_exact() -> None:
    """Negative control: another distribution is declared than that the tokens were drawn from."""
    target, heads = five_ids()

    class Wrong(MedusaDrafter):
        def propose(self, sequence, depth):
            tree = super().propose(sequence, depth)
            return tree._replace(probs=(tree.probs + tree.probs.roll(1, -1)) / 2)

    shape, params = TreeShape.parse("chain_k2"), SamplingParams(1.0)
    drafter = Wrong(heads, shape, vocab_size=5, params=params)
    counts = loop_counts(target, drafter, shape, params, 1_500, num_tokens=3, vocab_size=5)
    assert chi_square_p_value(counts, exact_joint(target, {"temperature": 1.0})) < 1e-6


def test_a_tree_that_is_too_deep_or_too_wide_gets_one_line(target: Target) -> None:
    heads, prompt = random_heads(target), Prompt("a", "0", "", list(b"whales"))
    options = {"temperatures": [0.0], "plain": False, "max_new_tokens": 4}
    with pytest.raises(
        UserError, match=r"decode\.methods=chain_k4: 4 levels for a draft of 3 Medusa heads; use at most"
    ):
        decode_trials(target, heads, [prompt], methods=["chain_k4"], **options)
    with pytest.raises(UserError, match=r"decode\.methods=static_101: 101 children for a draft of 100 ids"):
        decode_trials(target, heads, [prompt], methods=["static_101"], **options)
    other = load_target("random:tiny_gpt2", dtype="fp32", device="cpu")
    with pytest.raises(UserError, match=r"hidden size 16, this one has 64"):
        speculative_decode(other, five_ids()[1], list(b"whales"), method="chain_k2")


# --- exporting -------------------------------------------------------------------------------------------------------


def vllm_choice(folder: Path, hidden: torch.Tensor) -> torch.Tensor:  # (T, D) -> (T, K)
    """Line by line what vLLM 0.32 computes from a folder (model_executor/models/medusa.py)."""
    config, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    chosen = []
    for head in range(config["num_heads"]):
        x = hidden
        for layer in range(config["num_hidden_layers"]):
            x = x + F.silu(F.linear(x, state.pop(f"blocks.{head}.layers.{layer}.weight")))
        weight = state.pop(f"lm_heads.{head}.weight")
        assert len(weight) == config["vocab_size"]  # its ParallelLMHead takes no other height
        chosen.append(F.linear(x, weight).argmax(-1))
    assert not state and config["truncated_vocab_size"] == config["vocab_size"]
    return torch.stack(chosen, dim=1)


def test_an_exported_folder_drafts_the_same_tokens(target: Target, tmp_path: Path) -> None:
    heads, hidden = random_heads(target, num_layers=2), torch.randn(200, 64)
    ours = heads.target_ids(heads.logits(heads(hidden)).argmax(-1)).T[:, :2]  # (T, 2)
    export(heads, target, tmp_path, to="vllm", draft_len=2)
    assert torch.equal(vllm_choice(tmp_path, hidden), ours) and len(set(ours.flatten().tolist())) > 20
    assert largest_difference(heads, tmp_path) < 1e-5  # in a process of its own
    again = load_medusa(tmp_path, target)
    assert (again.config.num_heads, again.config.truncated_vocab_size) == (2, 259)


def test_reading_again_is_strict(target: Target, tmp_path: Path) -> None:
    heads = random_heads(target)
    export(heads, target, tmp_path, to="vllm", draft_len=3)
    state = load_file(tmp_path / "model.safetensors")
    probe = {"features": torch.randn(5, 64)}
    torch.testing.assert_close(probe_logits(read_folder(tmp_path), probe), probe_logits(heads, probe))
    save_file({**state, "lm_heads.0.weight": state["lm_heads.1.weight"].clone()}, tmp_path / "model.safetensors")
    assert (probe_logits(read_folder(tmp_path), probe) - probe_logits(heads, probe)).abs().max() > 0.1
    save_file({**state, "token_map": torch.arange(259)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="token_map"):
        read_folder(tmp_path)


def test_only_vllm_serves_them(target: Target) -> None:
    heads = build_medusa(target=target, draft_vocab_size=100)
    assert kind_of(heads) == "medusa" and servable(target.config, "medusa", "vllm") is None
    for engine in ("sglang", "trtllm", "hf", "speculators"):
        assert "Medusa" in servable(target.config, "medusa", engine)
    assert len(unservable_lines(target.config, "medusa")) == 2
    command = serve_command("vllm", "medusa", "a", "t", draft_len=4, dtype="bfloat16")
    assert '{"method": "medusa", "model": "a", "num_speculative_tokens": 4}' in command


def test_more_tokens_than_heads_are_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"export\.draft_len=4: the draft has 3 Medusa heads"):
        export(random_heads(target), target, tmp_path, to="vllm", draft_len=4)


# --- the whole job ---------------------------------------------------------------------------------------------------

JOB = ["draft=medusa", "draft.num_heads=3", "draft.draft_vocab_size=100", "optim=muon"]


@pytest.fixture
def _medusas_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_distill.TINY", [*(o for o in TINY if "n_embd" not in o), "~draft.n_positions"])


def test_crashed_and_resumed_equals_uninterrupted(
    tmp_path: Path, cache_root: Path, _medusas_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what such a run is good for: its snapshots are judged, it is exported."""
    more = (*JOB, "optim.ema_decay=0.9", "trainer.checkpoint_every_steps=2")
    straight = run(tmp_path, cache_root, *more, "trainer.snapshot_every_steps=4", name="straight")
    run_into_a_crash(9, tmp_path, cache_root, *more, "trainer.snapshot_every_steps=4", name="resumed")
    resumed = run(tmp_path, cache_root, *more, "trainer.snapshot_every_steps=4", name="resumed")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (straight, resumed))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-6)
    first, second = (read_metrics_csv(tmp_path / "outputs" / name / "metrics.csv") for name in ("straight", "resumed"))
    for name in ("train/loss", "train/grad_norm", "val/alpha", "val/alpha_step1", "val/hits_step2"):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(second[name]), rtol=1e-6, atol=1e-6)
    losses = [value for _, value in first["train/loss"]]
    assert losses[-1] < losses[0]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        pair = load_pair(compose("decode", [f"run={straight / 'snapshots' / 'step-000004'}"]), [])
        assert isinstance(pair.draft, MedusaHeads) and pair.draft.config.num_heads == 3
        places = [
            f"checkpoint_root={straight.parent}",
            f"output_root={tmp_path / 'outputs'}",
            f"out={tmp_path / 'out'}",
        ]
        cfg = compose("export", ["run=straight", "to=vllm", "export.target_path=T", *places])
    folder = export_run(cfg)
    card = (folder / "README.md").read_text()
    assert '"method": "medusa"' in card and "| draft vocabulary | 100 of 259 ids |" in card and "Medusa heads" in card
    hidden, heads = torch.randn(50, 64), load_for(pair.target, straight)
    assert torch.equal(vllm_choice(folder, hidden), heads.target_ids(heads.logits(heads(hidden)).argmax(-1)).T)
    cfg.to, cfg.overwrite = "sglang", True
    with pytest.raises(UserError, match=r"to=sglang: SGLang is not known to load Medusa"):
        export_run(cfg)


def test_online_equals_cached_and_val_alpha_the_expected_alpha(
    tmp_path: Path, cache_root: Path, _medusas_keys: None
) -> None:
    more = (*JOB, "trainer.max_steps=3", "trainer.val_every_steps=3", "alpha.max_tokens=null")
    cached = run(tmp_path, cache_root, *more, name="cached")
    online = run(tmp_path, cache_root, *more, "cache.mode=none", name="online")
    metrics = json.loads((cached / "run.json").read_text())["metrics"]
    assert metrics["val/alpha"] == pytest.approx(metrics["alpha_expected/held_out/T1"], abs=1e-4)
    assert metrics["val/kl"] == pytest.approx(metrics["kl/held_out"], abs=1e-3)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (cached, online))
    for name, tensor in ours.items():
        # Muon makes all directions of a gradient alike, those of rounding too
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-4 if "blocks" in name else 5e-5)
    first, second = (read_metrics_csv(tmp_path / "outputs" / name / "metrics.csv") for name in ("cached", "online"))
    for name in ("train/loss", "train/alpha", "train/tokens"):
        torch.testing.assert_close(torch.tensor(first[name]), torch.tensor(second[name]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.signal=topk", r"cache\.signal=topk: draft=medusa learns from cache=hidden"),
        ("draft.draft_vocab_size=999", r"draft\.draft_vocab_size=999: the target has 259 ids"),
    ],
)
def test_a_jobs_mistakes_name_the_key(
    tmp_path: Path, cache_root: Path, _medusas_keys: None, override: str, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        run(tmp_path, cache_root, *JOB, "trainer.max_steps=1", override)
