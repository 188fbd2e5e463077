"""A wrong export is refused, each fault by a line of its own; a good one passes. Folders are written by hand here."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train.check_export
from models.check_export import check_folder, looks_drawn
from models.eagle import EagleHead, build_eagle
from models.errors import UserError
from models.import_head import read_head
from models.target import Target, load_target
from train.check_export import Row, acceptance_by_shift, shifted_taps

TAPS = "eagle_aux_hidden_state_layer_ids"
V, VD, D = 259, 100, 64
DRAFT_IDS = torch.randperm(V, generator=torch.Generator().manual_seed(0))[:VD].sort().values


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


@pytest.fixture(scope="module")
def other_target() -> Target:
    """The same model, tapped elsewhere than by default."""
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids=[1, 3, 6])


def layer_fields(head: EagleHead) -> dict:
    return {
        "model_type": "llama", "hidden_size": D, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": V,
        "max_position_embeddings": 1024, "rms_norm_eps": head.config.rms_norm_eps, "hidden_act": "silu",
        "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def portable(target: Target) -> tuple[dict, dict]:
    """Config and tensors of an EAGLE-3 head as every engine reads them."""
    head = build_eagle(target=target, draft_vocab_size=VD, draft_vocab=DRAFT_IDS)
    config = {"architectures": ["LlamaForCausalLMEagle3"], **layer_fields(head), "draft_vocab_size": VD}
    if target.tap_ids != (2, 4, 5):
        config |= {TAPS: list(target.tap_ids), "eagle_config": {TAPS: [i - 1 for i in target.tap_ids]}}
    tensors = {name: tensor.detach().clone() for name, tensor in head.state_dict().items() if name != "tap_scale"}
    return config, tensors


def eagle1(target: Target, architecture: str) -> tuple[dict, dict]:
    head = build_eagle(target=target, kind="eagle1", draft_vocab_size=None)
    tensors = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    if architecture == "LlamaForCausalLMEagle":
        tensors["fc.bias"] = torch.zeros(D)
    return {"architectures": [architecture], **layer_fields(head)}, tensors


def speculators(target: Target) -> tuple[dict, dict]:
    config, tensors = portable(target)
    layer = {key: config.pop(key) for key in layer_fields(build_eagle(target=target, draft_vocab_size=VD))}
    config |= {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer, TAPS: [2, 4, 5],
    }  # fmt: skip
    return config, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def lines(target: Target, folder: Path, **options) -> list[str]:
    known = {"target_embedding": target.embedding, "target_config": target.config, "tap_ids": target.tap_ids}
    return check_folder(folder, **(known | options))


# --- good folders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [None, "vllm", "sglang", "trtllm"])
def test_a_portable_folder_passes(target: Target, other_target: Target, tmp_path: Path, to: str | None) -> None:
    for name, each in (("default", target), ("other", other_target)):
        folder = write(tmp_path / name, *portable(each))
        assert lines(each, folder, to=to) == []
    folder = write(tmp_path / "default", *portable(target))
    assert check_folder(folder, to=to, target_embedding=target.embedding) == []  # nothing known but the embedding


def test_the_other_layouts_pass(target: Target, tmp_path: Path) -> None:
    for to, architecture in (("vllm", "EagleLlamaForCausalLM"), ("sglang", "LlamaForCausalLMEagle")):
        folder = write(tmp_path / to, *eagle1(target, architecture))
        assert lines(target, folder, to=to, tap_ids=None) == []
        assert lines(target, folder, tap_ids=None) == []
    folder = write(tmp_path / "speculators", *speculators(target))
    assert lines(target, folder) == lines(target, folder, to="vllm") == lines(target, folder, to="speculators") == []


def test_a_head_over_all_ids_needs_no_map_and_the_targets_embedding_may_be_left_out(target, tmp_path: Path) -> None:
    head = build_eagle(target=target, draft_vocab_size=None)
    config, tensors = portable(target)
    tensors |= {"lm_head.weight": head.lm_head.weight.detach()}
    for name in ("d2t", "t2d", "embed_tokens.weight"):
        del tensors[name]
    assert lines(target, write(tmp_path / "a", config | {"draft_vocab_size": V}, tensors)) == []


# --- each fault by its own line ----------------------------------------------------------------------------------


def drop(*names: str):
    def mutate(config: dict, tensors: dict) -> None:
        for name in names:
            del tensors[name]

    return mutate


def put(**given):
    return lambda config, tensors: config.update(given)


def tensor(name: str, make):
    return lambda config, tensors: tensors.update({name: make(tensors.get(name))})


def unwrite(*keys: str):
    def mutate(config: dict, tensors: dict) -> None:
        for key in keys:
            del config[key]

    return mutate


def lost_theta(config: dict, tensors: dict) -> None:
    del config["rope_theta"], config["rope_parameters"]["rope_theta"]


def prefix(config: dict, tensors: dict) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def rename_block(config: dict, tensors: dict) -> None:
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def two_blocks(config: dict, tensors: dict) -> None:
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors[name].clone()


def draw(x: torch.Tensor | None) -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(1)) * 0.02


def spoil(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[3] = float("nan")
    return x


MUTATIONS = {
    "missing d2t": (drop("d2t"), r"^d2t is missing.*draft id i for target id i"),
    "absolute d2t": (tensor("d2t", lambda x: DRAFT_IDS.clone()), r"^d2t is absolute"),
    "absolute d2t without t2d": (
        lambda c, t: (t.update(d2t=DRAFT_IDS.clone()), t.pop("t2d")),
        r"^d2t is absolute \(it begins \[\d+, \d+, \d+\]\)",
    ),
    "identity d2t": (tensor("d2t", torch.zeros_like), r"^d2t and t2d disagree"),
    "identity d2t without t2d": (
        lambda c, t: (t.update(d2t=torch.zeros(VD, dtype=torch.int64)), t.pop("t2d")),
        r"^d2t is all zeros",
    ),
    "d2t out of range": (tensor("d2t", lambda x: x + V), r"^d2t leads out of the target's 259 ids"),
    "d2t with repeats": (
        tensor("d2t", lambda x: torch.cat((x[:-1], x[-2:-1] - 1))),
        r"^d2t gives 1 target ids twice",
    ),
    "float d2t": (tensor("d2t", lambda x: x.float()), r"^d2t is float32"),
    "int32 d2t": (tensor("d2t", lambda x: x.int()), r"^d2t is int32"),
    "uint8 t2d": (tensor("t2d", lambda x: x.to(torch.uint8)), r"^t2d is uint8"),
    "short t2d": (tensor("t2d", lambda x: x[:-1]), r"^t2d has shape \[258\]"),
    "missing lm_head": (drop("lm_head.weight"), r"^lm_head\.weight is missing.*other ids"),
    "missing hidden_norm": (drop("midlayer.hidden_norm.weight"), r"^midlayer\.hidden_norm\.weight is missing"),
    "missing fc": (drop("fc.weight"), r"^fc\.weight is missing"),
    "random embeddings": (tensor("embed_tokens.weight", draw), r"^embed_tokens\.weight has nothing of the target's"),
    "trained embeddings": (
        tensor("embed_tokens.weight", lambda x: x + 0.3 * draw(None)),
        r"^embed_tokens\.weight was trained.*SGLang replaces it",
    ),
    "narrow embeddings": (tensor("embed_tokens.weight", lambda x: x[:, :32]), r"^embed_tokens\.weight has shape"),
    "a stray bias": (
        tensor("midlayer.self_attn.q_proj.bias", lambda x: torch.ones(D)),
        r"^midlayer\.self_attn\.q_proj\.bias is a bias that config\.json does not state",
    ),
    "a bias of fc": (tensor("fc.bias", lambda x: torch.ones(D)), r"^fc\.bias is a bias"),
    "an unknown name": (tensor("mask_hidden", lambda x: torch.ones(1, 3 * D)), r"^mask_hidden is unknown"),
    "a `model.` prefix": (prefix, r"have a `model\.` prefix"),
    "the block by its other name": (rename_block, r"^the block is named layers\.0\.\*.*SGLang"),
    "the block by both names": (two_blocks, r"^the block is there as midlayer\.\* and as layers\.0\.\*"),
    "not a number": (tensor("fc.weight", spoil), r"^fc\.weight has 1 values that are not finite"),
    "a wrong shape": (
        tensor("midlayer.mlp.up_proj.weight", lambda x: x[:64]),
        r"^midlayer\.mlp\.up_proj\.weight has shape \[64, 64\], and config\.json says \[128, 64\]",
    ),
    "lost rope_theta": (lost_theta, r"^rope_theta is written nowhere"),
    "lost rope_theta, before transformers 5": (unwrite("rope_theta"), r"^rope_theta is not written at the top level"),
    "lost rope_theta, since transformers 5": (
        put(rope_parameters={"rope_type": "default"}),
        r"^rope_parameters has no rope_theta",
    ),
    "two rope_theta": (put(rope_theta=500000.0), r"^rope_theta is 500000 at the top level and 10000 in rope_param"),
    "lost scaling": (
        put(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
        r"^RoPE is scaled by nothing in rope_scaling and by .*linear",
    ),
    "shifted taps": (
        put(**{TAPS: [3, 5, 6], "eagle_config": {TAPS: [2, 4, 5]}}),
        r"^shifted taps, by \+1: engines read the inputs of blocks \[3, 5, 6\], .* on \[2, 4, 5\]",
    ),
    "other taps": (put(**{TAPS: [1, 4, 6], "eagle_config": {TAPS: [0, 3, 5]}}), r"^other taps: .*\[1, 4, 6\]"),
    "one convention shifted": (
        put(**{TAPS: [2, 4, 5], "eagle_config": {TAPS: [2, 4, 5]}}),
        r"^shifted taps: .*must be one less: \[1, 3, 4\]",
    ),
    "taps for SGLang alone": (put(eagle_config={TAPS: [1, 3, 4]}), r"stands in eagle_config alone.*write \[2, 4, 5\]"),
    "no draft_vocab_size": (unwrite("draft_vocab_size"), r"^config\.json has no draft_vocab_size: vLLM takes the tar"),
    "tied": (put(tie_word_embeddings=True), r"^tie_word_embeddings=true"),
    "32 blocks": (put(num_hidden_layers=32), r"^num_hidden_layers=32"),
    "a norm that SGLang lacks": (put(norm_before_residual=True), r"^norm_before_residual=true: SGLang"),
    "biases that SGLang lacks": (put(attention_bias=True), r"^attention_bias=true: SGLang"),
    "biases of the MLP that are not there": (put(mlp_bias=True), r"^midlayer\.mlp\.up_proj\.bias is missing"),
    "an epsilon below 0": (put(rms_norm_eps=-1.0), r"^rms_norm_eps=-1\.0: norms need one above 0"),
    "another activation": (put(hidden_act="gelu"), r"^hidden_act=gelu: engines' blocks know silu alone"),
    "another class": (put(architectures=["Eagle3LlamaForCausalLM"]), r"^architectures=.*LlamaForCausalLMEagle3"),
    "few positions": (put(max_position_embeddings=512), r"^max_position_embeddings=512: the target serves 1024"),
    **{
        f"no {key}": (unwrite(key), rf"^config\.json has no {key}: engines take")
        for key in ("max_position_embeddings", "rms_norm_eps", "num_key_value_heads", "intermediate_size")
    },
}
ALSO_MORE = ("biases", "no ")  # what else is wrong then has lines of its own: tensors missing, or of other shapes


@pytest.mark.parametrize("case", MUTATIONS)
def test_a_fault_has_its_own_line(case: str, target: Target, tmp_path: Path) -> None:
    mutate, message = MUTATIONS[case]
    config, tensors = portable(target)
    mutate(config, tensors)
    found = lines(target, write(tmp_path / "head", config, tensors))
    hits = [line for line in found if re.search(message, line)]
    assert len(hits) == 1 and "\n" not in hits[0], found
    if not case.startswith(ALSO_MORE):
        assert found == hits


def test_taps_that_stand_nowhere_or_for_one_engine_alone(other_target: Target, tmp_path: Path) -> None:
    config, tensors = portable(other_target)
    del config["eagle_config"]
    found = lines(other_target, write(tmp_path / "top", config, tensors))
    assert len(found) == 1 and "SGLang reads eagle_config and takes its default; write [0, 2, 5]" in found[0]
    assert lines(other_target, tmp_path / "top", to="vllm") == []
    del config[TAPS]
    found = lines(other_target, write(tmp_path / "none", config, tensors))
    assert len(found) == 1 and found[0].startswith("other taps: engines read the inputs of blocks [2, 4, 5]")
    found = check_folder(tmp_path / "none", target_embedding=other_target.embedding, tap_ids=[1, 3, 6])
    assert len(found) == 1 and "is written nowhere" in found[0]


def test_faults_that_one_engine_minds(target: Target, tmp_path: Path) -> None:
    config, tensors = portable(target)
    rename_block(config, tensors)
    folder = write(tmp_path / "head", config | {"norm_before_residual": True}, tensors)
    assert lines(target, folder, to="vllm") == []
    assert len(lines(target, folder, to="sglang")) == 2
    assert lines(target, folder, to="speculators") != []
    with pytest.raises(UserError, match=r"^to=tgi: .*vllm, sglang"):
        check_folder(folder, to="tgi")


def test_embeddings_without_the_target_at_hand(target: Target, tmp_path: Path) -> None:
    config, tensors = portable(target)
    tensors["embed_tokens.weight"] = draw(None)
    assert ["random table" in line for line in check_folder(write(tmp_path / "a", config, tensors))] == [True]
    scales = torch.linspace(0.3, 2.0, V)[:, None]  # trained rows: rare tokens short, common ones long
    tensors["embed_tokens.weight"] = draw(None) * scales
    assert check_folder(write(tmp_path / "b", config, tensors)) == []


@pytest.mark.slow
def test_a_trained_embedding_does_not_look_random(smollm2: Target) -> None:
    assert not looks_drawn(smollm2.embedding)


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (unwrite("norm_before_residual"), r"^config\.json has no norm_before_residual: vLLM takes true"),
        (drop("t2d"), r"^t2d is missing"),
        (put(speculators_model_type="peagle"), r"^speculators_model_type=peagle"),
        (drop("layers.0.hidden_norm.weight"), r"^midlayer\.hidden_norm\.weight is missing"),
        (put(**{TAPS: [1, 3, 4]}), r"^shifted taps, by -1"),
        (put(norm_before_fc=True), r"^input_norm\.weight is missing"),
    ],
)
def test_a_speculators_folder(mutate, message: str, target: Target, tmp_path: Path) -> None:
    config, tensors = speculators(target)
    mutate(config, tensors)
    found = lines(target, write(tmp_path / "head", config, tensors))
    assert len(found) == 1 and re.search(message, found[0]), found


@pytest.mark.parametrize(
    ("to", "mutate", "message"),
    [
        ("vllm", tensor("lm_head.weight", lambda x: torch.ones(V, D)), r"^lm_head\.weight: EAGLE-1"),
        ("vllm", tensor("layers.0.input_layernorm.weight", lambda x: torch.ones(D)), r"input_layernorm.*has no such"),
        ("vllm", tensor("norm.weight", lambda x: torch.ones(D)), r"^norm\.weight: EAGLE-1 has no such norm"),
        ("vllm", tensor("fc.bias", lambda x: torch.ones(D)), r"^fc\.bias is a bias"),
        ("vllm", put(architectures=["LlamaForCausalLMEagle"]), r"^architectures=.*EagleLlamaForCausalLM"),
        ("sglang", drop("fc.bias"), r"^fc\.bias is missing: .*write zeros"),
        ("sglang", put(architectures=["EagleLlamaForCausalLM"]), r"^architectures=.*LlamaForCausalLMEagle"),
    ],
)
def test_an_eagle1_folder(to: str, mutate, message: str, target: Target, tmp_path: Path) -> None:
    names = {"vllm": "EagleLlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}
    config, tensors = eagle1(target, names[to])
    mutate(config, tensors)
    found = lines(target, write(tmp_path / "head", config, tensors), to=to, tap_ids=None)
    hits = [line for line in found if re.search(message, line)]
    assert len(hits) == 1, found


def test_what_is_no_head_at_all(target: Target, tmp_path: Path) -> None:
    assert "no such folder" in check_folder(tmp_path / "none")[0]
    folder = write(tmp_path / "llama", {"architectures": ["LlamaForCausalLM"]}, {"lm_head.weight": torch.ones(V, D)})
    assert check_folder(folder)[0].startswith("architectures=['LlamaForCausalLM']: no EAGLE head")
    (folder / "model.safetensors").write_bytes(b"{}")
    assert "model.safetensors cannot be read" in check_folder(folder)[0]
    (folder / "model.safetensors").unlink()
    assert "no weights there" in check_folder(folder)[0]
    (folder / "config.json").write_text("[")
    assert "config.json cannot be read" in check_folder(folder)[0]
    config, tensors = portable(target)
    found = check_folder(write(tmp_path / "type", config | {"model_type": "t5"}, tensors))
    assert len(found) == 1 and "model_type=t5" in found[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({TAPS: "2,4,5"}, "has eagle_aux_hidden_state_layer_ids=2,4,5: it must be a list of blocks' numbers"),
        ({TAPS: [2.0, 4.0, 5.0]}, "it must be a list of blocks' numbers"),
        ({"eagle_config": {TAPS: 4}}, "eagle_aux_hidden_state_layer_ids=4: it must be a list"),
        ({"eagle_config": [1, 3, 4]}, "config.json has eagle_config=[1, 3, 4]: it must be a mapping"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "Eagle3: it must be a list of names"),
        ({"rope_scaling": "linear"}, "rope_scaling=linear: it must be a mapping"),
        ({"rope_theta": "10000"}, "config.json has rope_theta=10000: it must be a number above 0"),
        ({"rope_theta": -5.0, "rope_parameters": None}, "config.json has rope_theta=-5.0: it must be a number above 0"),
    ],
)  # fmt: skip
def test_fields_of_another_kind_are_told_in_one_line(given: dict, message: str, target: Target, tmp_path: Path) -> None:
    config, tensors = portable(target)
    found = lines(target, write(tmp_path / "head", config | given, tensors))
    assert len(found) == 1 and message in found[0], found
    with pytest.raises(UserError, match=re.escape(message)):
        read_head(tmp_path / "head", target)


def test_a_scaling_that_nobody_knows(target: Target, tmp_path: Path) -> None:
    config, tensors = portable(target)
    rope = {"rope_parameters": {"rope_type": "stretched", "rope_theta": 10000.0}}
    found = lines(target, write(tmp_path / "head", config | rope, tensors))
    assert len(found) == 1 and "rope_type=stretched, which transformers has not" in found[0]


def test_fields_that_are_null_are_as_good_as_left_out(target: Target, tmp_path: Path) -> None:
    config, tensors = portable(target)
    null = dict.fromkeys((TAPS, "eagle_config", "rope_scaling"))
    assert lines(target, write(tmp_path / "head", config | null, tensors)) == []


# --- measured with the target ------------------------------------------------------------------------------------


def texts(num_rows: int = 6, num_prompt: int = 4, length: int = 24) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(0, 256, (length,), generator=generator).tolist(), num_prompt) for _ in range(num_rows)]


@torch.no_grad()
def over_fitted(target: Target, rows: list[Row]) -> EagleHead:
    """A head whose block adds nothing and whose fc is solved for: taps at t -> the target's final state at t + 1.

    Its 192 inputs are more than the tokens of the rows, so that it is exact on them, and only with the right taps.
    """
    head = build_eagle(target=target, draft_vocab_size=None)
    head.midlayer.self_attn.o_proj.weight.zero_()
    head.midlayer.mlp.down_proj.weight.zero_()
    states = [target.states(torch.tensor([ids])) for ids, _ in rows]
    taps = torch.cat([s.taps[0, n - 1 : -2].flatten(-2) for s, (_, n) in zip(states, rows)])  # (N, 3D)
    finals = torch.cat([s.final_hidden[0, n:-1] for s, (_, n) in zip(states, rows)])  # (N, D)
    head.fc.weight.copy_(torch.linalg.lstsq(taps.double(), finals.double(), driver="gelsd").solution.T.float())
    return head.eval()


@pytest.mark.parametrize("by", [-1, 0, 1])
def test_taps_that_are_one_block_off_are_measured(by: int, target: Target) -> None:
    rows = texts()
    head = over_fitted(target, rows)
    true = head.config.tap_ids
    object.__setattr__(head.config, "tap_ids", tuple(i + by for i in true))  # as a wrong config.json would say
    shifts = acceptance_by_shift(target, head, rows)
    assert target.tap_ids == true  # left as it was
    alphas = {shift.by: shift.alpha[0] for shift in shifts}
    assert alphas[-by] > 0.95 and all(alpha < 0.5 for shift, alpha in alphas.items() if shift != -by), alphas
    found = shifted_taps(head, shifts)
    if by == 0:
        assert found == []
    else:
        assert len(found) == 1 and found[0].startswith(f"shifted taps, by {by:+d}: "), found
        assert found[0].endswith(f"write {list(true)}")


def test_shifts_that_the_target_has_not_are_left_out(target: Target) -> None:
    ends = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids=[0, 3, 7])
    head = build_eagle(target=ends, draft_vocab_size=None)
    assert [shift.by for shift in acceptance_by_shift(target, head, texts(1))] == [0]
    eagle1_head = build_eagle(target=target, kind="eagle1", draft_vocab_size=None)
    shifts = acceptance_by_shift(target, eagle1_head, texts(1))
    assert [shift.by for shift in shifts] == [0] and shifted_taps(eagle1_head, shifts) == []


def run_main(monkeypatch, capsys, *overrides: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["check_export", *overrides])
    try:
        train.check_export.main()
        code = 0
    except SystemExit as stopped:
        code = stopped.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command(target: Target, tmp_path: Path, monkeypatch, capsys) -> None:
    config, tensors = portable(target)
    folder = write(tmp_path / "head", config, tensors)
    common = [f"folder={folder}", f"hydra.run.dir={tmp_path}/hydra", "device=cpu", "dtype=fp32"]
    with_target = [*common, "target=hf", "target.source=random:tiny_llama", "decode.num_prompts=2"]
    code, out, err = run_main(monkeypatch, capsys, *with_target, "decode.max_new_tokens=8")
    assert code == 0 and err == "" and "nothing that an engine would get wrong" in out, (out, err)
    assert out.count("alpha_expected at T = 1, taps") == 3
    write(folder, config, load_file(folder / "model.safetensors") | {"fc.bias": torch.ones(D)})
    code, out, err = run_main(monkeypatch, capsys, *common)
    assert code == 2 and "problem: fc.bias is a bias" in out and err.startswith("error: folder="), (out, err)
    code, _, err = run_main(monkeypatch, capsys, *common[1:])
    assert code == 2 and err.startswith("error: folder: not given"), err
