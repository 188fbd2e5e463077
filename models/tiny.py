"""Small random models and a byte tokenizer: for tests, the smoke experiment and speed checks without weights."""

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from models.errors import UserError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(*, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """One id a byte (0..255), then <|endoftext|> 256, <|im_start|> 257, <|im_end|> 258 (end of turn): 259 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<|im_start|>",
    )
    if chat_template:
        fast.chat_template = CHATML
    return fast


def shape_config(shape: str) -> PreTrainedConfig:
    """Configuration of a named shape; the tiny ones take the byte tokenizer's 259 ids."""
    shapes = {
        "tiny_llama": lambda: LlamaConfig(
            vocab_size=259, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
            bos_token_id=257, eos_token_id=258, pad_token_id=256,
        ),
        "tiny_gpt2": lambda: GPT2Config(
            vocab_size=259, n_embd=64, n_layer=4, n_head=4, n_positions=256,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=257, eos_token_id=258, pad_token_id=256,
        ),
        "smollm2_135m": lambda: LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, rope_theta=100000.0,
            bos_token_id=1, eos_token_id=2, pad_token_id=2,
        ),
    }  # fmt: skip
    if shape not in shapes:
        raise UserError(f"target.source=random:{shape}: unknown shape; use one of {', '.join(shapes)}")
    return shapes[shape]()


def random_model(shape: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A seeded random model of a named shape.

    Weight matrices have std 1/sqrt(fan_in) and embeddings are as wide as trained ones, so that logits spread over
    several units: the default 0.02 gives a nearly uniform softmax, on which every test of a distribution passes.
    """
    model = AutoModelForCausalLM.from_config(shape_config(shape)).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                std = 2.5 * parameter.shape[1] ** -0.5 if parameter is embedding else min(parameter.shape) ** -0.5
                parameter.normal_(0.0, std, generator=generator)
    for parameter in model.parameters():  # not model.to(dtype): rotary frequencies stay fp32, as in a loaded model
        parameter.data = parameter.data.to(dtype)
    return model.eval()
