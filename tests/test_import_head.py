"""A published head becomes a run with the same function: folders of each layout are written by hand and read back.

The reference is written out here, after vLLM's and the `speculators` library's code, and shares nothing with EagleHead.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file
from torch import Tensor

import train.import_head
from eval.alpha import evaluate_alpha
from eval.entry import CONF_DIR
from eval.loop import speculative_decode
from eval.run import load_pair
from models.eagle import EagleHead, build_eagle
from models.errors import UserError
from models.import_head import read_head
from models.kv_cache import RollbackCache
from models.target import Target, load_target
from tests.test_check_export import DRAFT_IDS, VD, D, V, eagle1, layer_fields, portable, speculators, write
from tests.test_head_mistakes import same_rows
from train.import_head import import_head

TAPS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


def head_of(target: Target, **options) -> EagleHead:
    return build_eagle(target=target, **({"draft_vocab_size": VD, "draft_vocab": DRAFT_IDS} | options)).eval()


@torch.no_grad()
def two_steps(head: EagleHead, target: Target) -> tuple[Tensor, Tensor]:  # (B, T, Vd) twice
    """Logits of a few slots, and of the next step, which is fed the outputs of the first."""
    input_ids = torch.arange(3, 19).view(2, 8)
    taps = target.states(input_ids).taps  # (B, T, L, D)
    positions = torch.arange(7).expand(2, -1)
    first = head(input_ids[:, 1:], head.project(taps[:, :-1]), positions)  # (B, T - 1, D)
    second = head(input_ids[:, 1:], first, positions)
    return head.logits(first), head.logits(second)


def assert_same_logits(ours: EagleHead, theirs: EagleHead, target: Target) -> None:
    for a, b in zip(two_steps(ours, target), two_steps(theirs, target)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


# --- layouts of the engines --------------------------------------------------------------------------------------


def as_layers(config: dict, tensors: dict) -> tuple[dict, dict]:
    return config, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def with_prefix(config: dict, tensors: dict) -> tuple[dict, dict]:
    return config, {f"model.{name}": tensor for name, tensor in tensors.items()}


def before_transformers_5(config: dict, tensors: dict) -> tuple[dict, dict]:
    del config["rope_parameters"]
    return config | {"architectures": ["LlamaForCausalLM"]}, tensors


def by_frequency(config: dict, tensors: dict) -> tuple[dict, dict]:
    """Draft ids in another order: d2t is no longer ascending."""
    order = torch.randperm(VD, generator=torch.Generator().manual_seed(3))
    d2t = DRAFT_IDS[order] - torch.arange(VD)
    return config, tensors | {"d2t": d2t, "lm_head.weight": tensors["lm_head.weight"][order]}


def without_what_the_target_gives(config: dict, tensors: dict) -> tuple[dict, dict]:
    return config, {name: tensor for name, tensor in tensors.items() if name not in ("t2d", "embed_tokens.weight")}


def zero_biases(config: dict, tensors: dict) -> tuple[dict, dict]:
    return config | {"attention_bias": True}, tensors | {"midlayer.self_attn.q_proj.bias": torch.zeros(D)}


LAYOUTS = [as_layers, with_prefix, before_transformers_5, by_frequency, without_what_the_target_gives, zero_biases]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_the_logits_are_those_of_the_head_that_was_written(layout, target: Target, tmp_path: Path) -> None:
    head = read_head(write(tmp_path / "head", *layout(*portable(target))), target)
    assert_same_logits(head, head_of(target), target)
    assert torch.equal(head.draft_vocab, DRAFT_IDS)
    assert torch.equal(head.t2d.nonzero()[:, 0], DRAFT_IDS)


def test_weights_in_a_pickle_or_in_several_files(target: Target, tmp_path: Path) -> None:
    config, tensors = portable(target)
    folder = write(tmp_path / "bin", config, {})
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert_same_logits(read_head(folder, target), head_of(target), target)
    names = sorted(tensors)
    folder = write(tmp_path / "two", config, {name: tensors[name] for name in names[:5]})
    save_file({name: tensors[name].contiguous() for name in names[5:]}, folder / "model-2.safetensors")
    assert_same_logits(read_head(folder, target), head_of(target), target)


def test_a_head_over_all_ids_takes_the_targets_head(target: Target, tmp_path: Path) -> None:
    theirs = head_of(target, draft_vocab_size=None, draft_vocab=None)
    left_out = ("tap_scale", "d2t", "t2d", "lm_head.weight", "embed_tokens.weight")
    tensors = {name: tensor for name, tensor in theirs.state_dict().items() if name not in left_out}
    config = portable(target)[0] | {"draft_vocab_size": V}
    assert_same_logits(read_head(write(tmp_path / "head", config, tensors), target), theirs, target)


def test_ids_of_padding_are_left_out(tmp_path: Path) -> None:
    """A target padded to a round width: a head over all of its rows drafts the real ids alone."""
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")
    target.vocab_size = 250
    config, tensors = portable(target)
    head = read_head(write(tmp_path / "head", config, tensors), target)
    assert torch.equal(head.draft_vocab, DRAFT_IDS[DRAFT_IDS < 250])


def test_half_precision_stays(target: Target, tmp_path: Path) -> None:
    config, tensors = portable(target)
    tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    head = read_head(write(tmp_path / "head", config, tensors), target)
    assert head.dtype == torch.bfloat16 and head.rotary.inv_freq.dtype == torch.float32


@torch.no_grad()
def test_an_eagle1_head(target: Target, tmp_path: Path) -> None:
    theirs = head_of(target, kind="eagle1", draft_vocab_size=None, draft_vocab=None)
    hidden = target.states(torch.arange(3, 11)[None]).final_hidden
    positions = torch.arange(8)[None]
    expected = theirs.logits(theirs(torch.arange(4, 12)[None], hidden, positions))
    for name in ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle"):
        head = read_head(write(tmp_path / name, *eagle1(target, name)), target)
        ours = head.logits(head(torch.arange(4, 12)[None], hidden, positions))
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


def test_scaled_positions_of_either_layout(target: Target, tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    config, tensors = portable(target)
    new = config | {"rope_parameters": {**scaling, "rope_theta": 500000.0}}
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    old |= {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    heads = [read_head(write(tmp_path / name, c, tensors), target) for name, c in (("new", new), ("old", old))]
    assert_same_logits(*heads, target)
    wanted = 500000.0 ** -(torch.arange(0, 16, 2) / 16) / 4.0
    torch.testing.assert_close(heads[1].rotary.inv_freq, wanted)


# --- folders of the speculators library --------------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def reference(tensors: dict[str, Tensor], flags: dict[str, bool], taps: Tensor, input_ids: Tensor) -> list[Tensor]:
    """Two steps of one sequence: taps (T, L, D) and tokens x[t+1] (T,) -> logits (T, Vd) of each step."""
    p = {name.removeprefix("layers.0."): tensor.double() for name, tensor in tensors.items()}
    num_heads, num_kv, size = 4, 2, 16
    joined = taps.double()  # (T, L, D)
    if flags.get("fc_norm"):
        joined = torch.stack([rms(joined[:, i], p[f"fc_norm.{i}.weight"]) for i in range(3)], dim=1)
    joined = joined.flatten(1)  # (T, 3D)
    if flags.get("norm_before_fc"):
        joined = rms(joined, p["input_norm.weight"])
    hidden = joined @ p["fc.weight"].T  # (T, D)
    num_slots = len(hidden)
    # the library counts positions from 1; attention sees their differences alone
    angles = (torch.arange(num_slots).double() + 1)[:, None] * 10000.0 ** (-torch.arange(0, size, 2).double() / size)
    logits = []
    for _ in range(2):
        normed = rms(hidden, p["hidden_norm.weight"])
        residual = normed if flags.get("norm_before_residual") else hidden
        x = torch.cat((rms(p["embed_tokens.weight"][input_ids], p["input_layernorm.weight"]), normed), dim=-1)
        q, k, v = (
            (x @ p[f"self_attn.{name}_proj.weight"].T).view(num_slots, -1, size).transpose(0, 1) for name in "qkv"
        )  # (H, T, Dh)
        if flags.get("qk_norm"):
            q, k = rms(q, p["self_attn.q_norm.weight"]), rms(k, p["self_attn.k_norm.weight"])

        def turned(y: Tensor) -> Tensor:
            left, right = y[..., : size // 2], y[..., size // 2 :]
            return torch.cat(
                (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), dim=-1
            )

        q, k = turned(q), turned(k)
        heads = []
        for i in range(num_heads):
            shared = i // (num_heads // num_kv)
            scores = q[i] @ k[shared].T / math.sqrt(size)
            scores = scores.masked_fill(torch.ones(num_slots, num_slots).triu(1).bool(), -torch.inf)
            heads.append(scores.softmax(-1) @ v[shared])
        hidden = residual + torch.cat(heads, dim=-1) @ p["self_attn.o_proj.weight"].T
        x = rms(hidden, p["post_attention_layernorm.weight"])
        x = F.silu(x @ p["mlp.gate_proj.weight"].T) * (x @ p["mlp.up_proj.weight"].T)
        hidden = hidden + x @ p["mlp.down_proj.weight"].T
        logits.append(rms(hidden, p["norm.weight"]) @ p["lm_head.weight"].T)
        hidden = rms(hidden, p["norm.weight"]) if flags.get("norm_output") else hidden
    return logits


def variant(target: Target, *flags: str) -> tuple[dict, dict]:
    """A speculators folder with these flags on and all norms away from one."""
    config, tensors = speculators(target)
    config |= {flag: flag in flags for flag in FLAGS}
    if "norm_before_fc" in flags:
        tensors["input_norm.weight"] = torch.ones(3 * D)
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{i}.weight": torch.ones(D) for i in range(3)}
    if "qk_norm" in flags:
        config["transformer_layer_config"]["model_type"] = "qwen3"
        tensors |= {f"layers.0.self_attn.{name}.weight": torch.ones(16) for name in ("q_norm", "k_norm")}
    config["transformer_layer_config"]["rms_norm_eps"] = 1e-6
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensors[name] = 0.5 + torch.rand(tensor.shape, generator=generator)
    return config, tensors


VARIANTS = [
    (), ("norm_before_residual",), ("norm_before_fc",), ("fc_norm",), ("norm_output",), ("qk_norm",),
    ("norm_before_residual", "norm_before_fc", "norm_output"), ("norm_before_residual", "fc_norm", "qk_norm"),
]  # fmt: skip


@pytest.mark.parametrize("flags", VARIANTS, ids=lambda flags: "+".join(flags) or "plain")
@torch.no_grad()
def test_a_speculators_head_computes_what_the_library_computes(flags, target: Target, tmp_path: Path) -> None:
    config, tensors = variant(target, *flags)
    head = read_head(write(tmp_path / "head", config, tensors), target)
    input_ids = torch.arange(3, 15)
    taps = target.states(input_ids[None]).taps  # (1, T, L, D)
    expected = reference(tensors, dict.fromkeys(flags, True), taps[0, :-1], input_ids[1:])
    positions = torch.arange(len(input_ids) - 1)[None]
    hidden = head.project(taps[:, :-1])
    for step in range(2):
        hidden = head(input_ids[None, 1:], hidden, positions)
        torch.testing.assert_close(head.logits(hidden)[0].double(), expected[step], atol=1e-5, rtol=1e-5)


PEER = """
import sys
import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

folder, given, answer = sys.argv[1:]
config = Eagle3SpeculatorConfig.from_pretrained(folder)
config.transformer_layer_config._attn_implementation = "sdpa"
model = Eagle3DraftModel(config).eval()
told = model.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)
assert not told.unexpected_keys and set(told.missing_keys) <= {"verifier_norm.weight", "verifier_lm_head.weight"}, told
logits = []
model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))
given = load_file(given)
documents = torch.zeros_like(given["input_ids"])
with torch.no_grad():
    model(given["taps"], given["input_ids"], documents, ttt_steps=2)
save_file({f"step{i}": each.contiguous() for i, each in enumerate(logits)}, answer)
"""


@pytest.mark.long
@pytest.mark.parametrize("flags", [VARIANTS[1], VARIANTS[6], VARIANTS[7]], ids="+".join)
@torch.no_grad()
def test_the_library_itself_agrees(flags, target: Target, tmp_path: Path) -> None:
    """Its second step is a simulated one: slot t sees the first step's slots up to t and itself, one position on."""
    python = Path(__file__).parents[1] / ".venv-speculators" / "bin" / "python"
    if not python.exists():
        pytest.skip("make setup-peer")
    folder = write(tmp_path / "head", *variant(target, *flags))
    input_ids = torch.arange(3, 20)[None]
    taps = target.states(input_ids).taps[:, :-1]  # (1, T, L, D)
    read = input_ids[:, 1:]  # (1, T)
    save_file({"taps": taps.flatten(-2).contiguous(), "input_ids": read.contiguous()}, tmp_path / "given")
    subprocess.run([python, "-c", PEER, folder, tmp_path / "given", tmp_path / "answer"], check=True, timeout=600)
    theirs = load_file(tmp_path / "answer")

    head, num_slots = read_head(folder, target), read.shape[1]
    cache, positions = RollbackCache(1, 2 * num_slots, static=False), torch.arange(num_slots)[None]
    first = head(read, head.project(taps), positions, cache)
    torch.testing.assert_close(head.logits(first)[0], theirs["step0"], atol=1e-4, rtol=1e-4)
    mask = torch.cat((torch.ones(num_slots, num_slots).tril(), torch.eye(num_slots)), dim=1).bool()[None, None]
    shifted = torch.cat((read[:, 1:], torch.zeros(1, 1, dtype=torch.int64)), dim=1)
    second = head(shifted, first, positions + 1, cache, mask)
    torch.testing.assert_close(head.logits(second)[0], theirs["step1"], atol=1e-4, rtol=1e-4)


def test_a_variant_is_saved_and_loaded_and_decodes_as_plain(target: Target, tmp_path: Path) -> None:
    """Each flag is in config.json and in the decode loop, which feeds outputs back and re-encodes accepted tokens."""
    config, tensors = variant(target, "norm_before_residual", "norm_before_fc", "norm_output")
    head = import_as_run(tmp_path, write(tmp_path / "head", config, tensors))[1]
    assert head.config.norm_before_residual and head.config.norm_before_fc and head.config.norm_output
    assert_same_logits(head, read_head(tmp_path / "head", target), target)
    prompt = list(range(10, 22))
    ours = speculative_decode(target, head, prompt, method="chain_k3", max_new_tokens=24, eos_token_ids=())
    plain = speculative_decode(target, None, prompt, max_new_tokens=24, eos_token_ids=())
    assert ours.token_ids == plain.token_ids
    with pytest.raises(UserError, match="norm_before_residual, which can be judged but not trained further"):
        head_of(target, init=str(tmp_path / "checkpoints" / "head"))


def test_a_sliding_window_is_as_far_as_the_head_drafts(target: Target, tmp_path: Path) -> None:
    config, tensors = speculators(target)
    config["transformer_layer_config"] |= {
        "model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 32, "use_sliding_window": True,
    }  # fmt: skip
    tensors |= {f"layers.0.self_attn.{name}.weight": torch.ones(16) for name in ("q_norm", "k_norm")}
    assert read_head(write(tmp_path / "head", config, tensors), target).config.max_position_embeddings == 32


# --- taps --------------------------------------------------------------------------------------------------------


def test_taps_as_written_as_told_or_by_default(target: Target, tmp_path: Path) -> None:
    config, tensors = portable(target)
    assert read_head(write(tmp_path / "a", config, tensors), target).config.tap_ids == (2, 4, 5)
    config |= {TAPS: [1, 3, 6]}
    assert read_head(write(tmp_path / "b", config, tensors), target).config.tap_ids == (1, 3, 6)
    config |= {"eagle_config": {TAPS: [0, 2, 5]}}
    assert read_head(write(tmp_path / "c", config, tensors), target).config.tap_ids == (1, 3, 6)
    assert read_head(tmp_path / "c", target, tap_ids=[2, 3, 4]).config.tap_ids == (2, 3, 4)
    del config[TAPS]
    with pytest.raises(UserError, match=r"not written at the top .*\[0, 2, 5\] in eagle_config .*target\.tap_ids"):
        read_head(write(tmp_path / "d", config, tensors), target)
    assert read_head(tmp_path / "d", target, tap_ids=[1, 3, 6]).config.tap_ids == (1, 3, 6)
    config |= {TAPS: [1, 3, 8]}
    with pytest.raises(UserError, match=r"folder=.*from 0 to 7; give the target that it was trained for"):
        read_head(write(tmp_path / "e", config | {"eagle_config": {}}, tensors), target)


# --- refusals ----------------------------------------------------------------------------------------------------


def given(**fields):
    return lambda config, tensors: config.update(fields)


def tensor(name: str, make):
    return lambda config, tensors: tensors.update({name: make(tensors.get(name))})


def without(name: str):
    return lambda config, tensors: tensors.pop(name)


REFUSALS = {
    "several blocks": (given(num_hidden_layers=2), "num_hidden_layers=2"),
    "another activation": (given(hidden_act="gelu"), "hidden_act=gelu"),
    "another width": (given(target_hidden_size=128), "target_hidden_size=128"),
    "no taps": (given(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state=false"),
    "another target": (given(vocab_size=V + 1), "vocabulary 260"),
    "a bias": (tensor("midlayer.self_attn.q_proj.bias", lambda x: torch.ones(D)), r"q_proj\.bias is a bias"),
    "no d2t": (without("d2t"), "d2t is missing"),
    "no lm_head": (without("lm_head.weight"), r"lm_head\.weight is missing"),
    "no norm": (without("norm.weight"), r"norm\.weight is missing"),
    "an absolute d2t": (tensor("d2t", lambda x: DRAFT_IDS.clone()), "d2t is absolute"),
    "an unknown tensor": (tensor("extra.weight", lambda x: torch.ones(3)), r"extra\.weight is a tensor"),
    "a wrong shape": (tensor("fc.weight", lambda x: x[:, :D]), r"fc\.weight has shape \[64, 64\]"),
    "a wrong vocabulary": (given(draft_vocab_size=50), "d2t has 100 rows, config.json says 50"),
    "not finite": (tensor("norm.weight", lambda x: x / 0), r"norm\.weight has values that are not finite"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_measured_is_refused_in_one_line(case: str, target: Target, tmp_path: Path) -> None:
    mutate, message = REFUSALS[case]
    config, tensors = portable(target)
    mutate(config, tensors)
    with pytest.raises(UserError, match=message) as caught:
        read_head(write(tmp_path / "head", config, tensors), target)
    assert "\n" not in str(caught.value)


def test_a_speculators_folder_must_say_where_its_residual_is(target: Target, tmp_path: Path) -> None:
    config, tensors = speculators(target)
    del config["norm_before_residual"]
    with pytest.raises(UserError, match="vLLM takes for true"):
        read_head(write(tmp_path / "head", config, tensors), target)
    with pytest.raises(UserError, match="peagle is no EAGLE head"):
        read_head(write(tmp_path / "p", config | {"speculators_model_type": "peagle"}, tensors), target)


# --- as a run ----------------------------------------------------------------------------------------------------


def composed(name: str, tmp_path: Path, *overrides: str):
    common = ["device=cpu", "dtype=fp32", f"checkpoint_root={tmp_path}/checkpoints", f"output_root={tmp_path}/outputs"]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
        return compose(config_name=name, overrides=[*common, *overrides])


def import_as_run(tmp_path: Path, folder: Path, *overrides: str) -> tuple[Target, EagleHead]:
    """Import, and find the run again as an evaluation does."""
    cfg = composed("import_head", tmp_path, f"folder={folder}", "target=tiny_random", *overrides)
    run = import_head(cfg)
    pair = load_pair(composed("alpha", tmp_path, f"run={run}"), [f"run={run}"])
    return pair.target, pair.draft


def test_a_run_that_the_evaluations_take(target: Target, tmp_path: Path, capsys) -> None:
    folder = write(tmp_path / "head", *portable(target))
    found, head = import_as_run(tmp_path, folder, "run=mine")
    run = tmp_path / "checkpoints" / "mine"
    assert found.tap_ids == (2, 4, 5) and head.config.tap_ids == (2, 4, 5)
    theirs = head_of(target)
    assert_same_logits(head, theirs, target)
    info = json.loads((run / "run.json").read_text())
    assert info["target"]["target_weights"] == target.fingerprint()["target_weights"]
    assert "100 draft ids" in capsys.readouterr().out
    rows = same_rows(*range(40, 60))
    options = {"temperatures": [1.0], "max_tokens": 20, "position_buckets": [], "seed": 0}
    ours = evaluate_alpha(found, head, rows, **options)["alpha_expected/held_out/T1"].value
    assert ours == pytest.approx(evaluate_alpha(target, theirs, rows, **options)["alpha_expected/held_out/T1"].value)
    import_as_run(tmp_path, folder, "run=mine")
    assert "imported before from this folder" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"holds a run of another config \(folder was"):
        import_as_run(tmp_path, write(tmp_path / "other", *portable(target)), "run=mine")


def test_mistakes_leave_no_run(target: Target, tmp_path: Path, monkeypatch, capsys) -> None:
    config, tensors = portable(target)
    tensors.pop("lm_head.weight")
    folder = write(tmp_path / "head", config, tensors)
    common = ["target=tiny_random", "device=cpu", "dtype=fp32", f"checkpoint_root={tmp_path}/checkpoints"]
    for overrides, message in (([f"folder={folder}"], "lm_head.weight is missing"), ([], "folder: not given")):
        monkeypatch.setattr(sys, "argv", ["import_head", *common, f"hydra.run.dir={tmp_path}/hydra", *overrides])
        with pytest.raises(SystemExit) as stopped:
            train.import_head.main()
        err = capsys.readouterr().err
        assert stopped.value.code == 2 and err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not (tmp_path / "checkpoints").exists()


def test_the_layer_config_of_these_tests_is_the_heads(target: Target) -> None:
    """So that a wrong default would be seen: the fields written by hand are those that the head has."""
    c = head_of(target).config
    written = layer_fields(head_of(target))
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert written[key] == getattr(c, key), key
    assert written["vocab_size"] == c.vocab_size and written["rope_parameters"] == c.rope_parameters
