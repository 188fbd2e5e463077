"""The frozen target: taps where the config says, heads tied or not and padded or not, every way to load it."""

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from models.errors import UserError
from models.target import Target, check_tap_ids, load_target, own_gpu, resolve_device, resolve_dtype
from models.tiny import byte_tokenizer, random_model, shape_config


@pytest.mark.parametrize("shape", ["tiny_llama", "tiny_gpt2"])
def test_taps_are_the_hidden_states_of_transformers(shape):
    target = load_target(f"random:{shape}", dtype="fp32", device="cpu", tap_ids=[0, 1, 3])
    input_ids = torch.randint(0, 256, (2, 17))
    states = target.states(input_ids)
    reference = target.model(input_ids=input_ids, output_hidden_states=True)
    for column, tap_id in enumerate(target.tap_ids):
        torch.testing.assert_close(states.taps[:, :, column], reference.hidden_states[tap_id])
    torch.testing.assert_close(states.final_hidden, reference.hidden_states[-1])
    torch.testing.assert_close(target.logits(states.final_hidden), reference.logits)


def test_default_taps_hold_the_markers_of_their_blocks():
    """Block i adds i+1 to channel i: the stream entering block t carries the markers of blocks 0..t-1 only."""
    target = load_target("random:tiny_llama", dtype="fp32", device="cpu", tap_ids="default")
    assert target.tap_ids == (2, 4, 5)
    plain = target.states(torch.tensor([[5, 6, 7]])).taps

    def mark(i):
        def hook(module, args, output):
            hidden = output[0] if isinstance(output, tuple) else output
            marked = hidden.clone()
            marked[..., i] += 1000.0 * (i + 1)
            return (marked, *output[1:]) if isinstance(output, tuple) else marked

        return hook

    handles = [block.register_forward_hook(mark(i)) for i, block in enumerate(target._blocks)]
    taps = target.states(torch.tensor([[5, 6, 7]])).taps
    for handle in handles:
        handle.remove()
    for column, tap_id in enumerate(target.tap_ids):
        marked = (taps[0, :, column] - plain[0, :, column]).abs().amin(0) > 500
        assert marked.nonzero().flatten().tolist() == list(range(tap_id))


def test_tap_ids_are_checked():
    assert check_tap_ids("default", 30) == (2, 15, 27)
    assert check_tap_ids(None, 2) is None
    with pytest.raises(UserError, match="at least 7 blocks"):
        check_tap_ids("default", 6)
    for bad in ([2, 2, 5], [3, 1], [0, 8], [-1, 2], []):
        with pytest.raises(UserError, match="strictly ascending"):
            check_tap_ids(bad, 8)


@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_folder_with_a_padded_head_loads(tmp_path, tied, tokenizer):
    """Width 320 over 259 real ids: the logits are cut to the real ones, whether the head is tied or its own."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    target = load_target(str(tmp_path), dtype="fp32", device="cpu")
    assert (target.vocab_size, target.head_width) == (259, 320)
    input_ids = torch.randint(0, 259, (1, 9))
    logits = target.logits(target.states(input_ids).final_hidden)
    assert logits.shape == (1, 9, 259)
    torch.testing.assert_close(logits, model(input_ids).logits[..., :259])


def test_padding_on_the_right_needs_no_mask(tiny_target):
    ids = torch.randint(0, 256, (1, 11))
    padded = torch.cat([ids, torch.zeros(1, 6, dtype=torch.long)], dim=1)
    alone, longer = tiny_target.states(ids).final_hidden, tiny_target.states(padded).final_hidden[:, :11]
    torch.testing.assert_close(alone, longer, atol=1e-5, rtol=1e-5)


def test_the_target_stays_frozen_and_in_eval_mode():
    config = GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.5)
    target = Target(GPT2LMHeadModel(config), byte_tokenizer(), name="dropout")
    holder = torch.nn.ModuleList([target]).train()
    assert holder.training and not target.training and not target.model.training
    assert not any(p.requires_grad for p in target.parameters())
    ids = torch.arange(10)[None]
    assert torch.equal(target.states(ids).final_hidden, target.states(ids).final_hidden)


def test_the_fingerprint_names_what_changed(tiny_target):
    base = tiny_target.fingerprint()
    assert load_target("random:tiny_llama", dtype="fp32", device="cpu").fingerprint() == base
    assert load_target("random:tiny_llama", dtype="bf16", device="cpu").fingerprint()["target_dtype"] == "bfloat16"
    model = random_model("tiny_llama")
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] += 1e-3
    changed = Target(model, byte_tokenizer(), name="x").fingerprint()
    assert {k for k in base if base[k] != changed[k]} == {"target_weights"}
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "bot")
    changed = Target(random_model("tiny_llama"), tokenizer, name="x").fingerprint()
    assert {k for k in base if base[k] != changed[k]} == {"chat_template"}


def test_an_architecture_with_another_head_is_refused():
    model = random_model("tiny_llama")
    forward = model.forward
    model.forward = lambda *args, **kwargs: _doubled(forward(*args, **kwargs))
    with pytest.raises(UserError, match="computes its logits in a way"):
        Target(model, byte_tokenizer(), name="odd")


def _doubled(output):
    output.logits = output.logits * 2 + 1
    return output


def test_a_gguf_of_a_gpt2_gives_the_original_logits(tmp_path):
    """GPT-2 stores Conv1D weights transposed and ties its head: both must survive the way through a GGUF file."""
    config = GPT2Config(vocab_size=261, n_embd=32, n_layer=2, n_head=2, n_positions=1024)
    model = GPT2LMHeadModel(config).eval()
    path = tmp_path / "tiny-gpt2.gguf"
    _write_gpt2_gguf(path, model)
    target = load_target(str(path), dtype="fp32", device="cpu", converted_root=str(tmp_path / "converted"))
    ids = torch.randint(0, 256, (1, 20))
    logits = target.logits(target.states(ids).final_hidden)
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def _write_gpt2_gguf(path, model):
    config = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = byte_tokenizer()
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens += ["\u0120\u0120", "\u0120\u0120\u0120\u0120"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 3 + [1] * 2)
    writer.add_token_merges(["\u0120 \u0120", "\u0120\u0120 \u0120\u0120"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    names = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
    parts = {
        "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    }  # fmt: skip
    for name, tensor in model.transformer.state_dict().items():
        module, kind = name.rsplit(".", 1)
        if module.startswith("h."):
            _, block, part = module.split(".", 2)
            out = f"blk.{block}.{parts[part]}.{kind}"
            if kind == "weight" and not part.startswith("ln"):
                tensor = tensor.T  # GGUF keeps linear layers as (out, in)
        else:
            out = f"{names[module]}.{kind}"
        writer.add_tensor(out, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_cannot_be_loaded_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cases = {
        "no-such-org/no-such-model": "out of reach.*target=smollm2_135m",
        "./no-such-folder": "no such folder",
        "no-such-file.gguf": "no such file",
        "package:no_such_package": "make setup",
        "random:nothing": "unknown shape",
    }
    for source, message in cases.items():
        with pytest.raises(UserError, match=message) as error:
            load_target(source, dtype="fp32", device="cpu")
        assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="not a model folder"):
        load_target(str(tmp_path), dtype="fp32", device="cpu")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(UserError, match="cannot read this GGUF"):
        load_target(str(broken), dtype="fp32", device="cpu", converted_root=str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine with a GPU has")
def test_a_missing_gpu_is_named(monkeypatch):
    with pytest.raises(UserError, match="no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda") and resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match=r"device=cuda:2: this machine has 2 GPUs; use cuda:0 to cuda:1"):
        resolve_device("cuda:2")


def test_each_process_loads_its_target_onto_its_own_gpu(monkeypatch):
    cpu, gpu, second = map(torch.device, ("cpu", "cuda", "cuda:1"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_gpu(gpu) == gpu
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_gpu(gpu) == torch.device("cuda:3") and own_gpu(second) == second and own_gpu(cpu) == cpu


def test_dtypes_are_resolved():
    assert resolve_dtype("fp32", torch.device("cpu")) is torch.float32
    assert resolve_dtype("bf16", torch.device("cpu")) is torch.bfloat16
    with pytest.raises(UserError, match="dtype=half"):
        resolve_dtype("half", torch.device("cpu"))


def test_random_targets_have_peaked_distributions(tiny_target, tiny_gpt2_target):
    for target in (tiny_target, tiny_gpt2_target):
        probs = target.logits(target.states(torch.arange(200)[None]).final_hidden).softmax(-1)
        entropy = -(probs * probs.log()).sum(-1).mean()
        assert 1.0 < entropy < 4.5  # uniform would be ln 259 = 5.56


def test_shapes_match_the_design():
    config = shape_config("smollm2_135m")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


@pytest.mark.slow
def test_the_embedded_target_answers_sensibly(smollm2):
    tokenizer = smollm2.tokenizer
    assert (smollm2.vocab_size, smollm2.num_blocks, smollm2.eos_token_ids) == (49152, 30, (2,))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt if isinstance(prompt, torch.Tensor) else prompt["input_ids"]
    output = smollm2.model.generate(ids, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, ids.shape[1] :])


@pytest.mark.slow
def test_the_embedded_tokenizer_gives_golden_ids(smollm2):
    golden = {
        "Hello, world!": [19556, 28, 905, 17],
        "double  space": [21414, 216, 1898],
        "café naïve 你好 🙂": [83, 1939, 2756, 15486, 46494, 216, 18645, 250, 48392, 138, 47526],
        "12345 3.14": [33, 34, 35, 36, 37, 216, 35, 30, 33, 36],
        "<|im_start|>user\nhi<|im_end|>": [1, 4093, 198, 6004, 2],
        "def f(x):\n    return x\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 198],
    }
    for text, ids in golden.items():
        assert smollm2.tokenizer(text)["input_ids"] == ids
        assert smollm2.tokenizer.decode(ids) == text
