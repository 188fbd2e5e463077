"""The command that serves an exported draft, for each engine. Those of SGLang 0.5.23 and TensorRT-LLM follow their
documentation and sources.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from models.servable import DRAFT_MODEL, EAGLE1, EAGLE3, MEDUSA

VLLM_METHODS = {DRAFT_MODEL: "draft_model", EAGLE1: "eagle", EAGLE3: "eagle3", MEDUSA: "medusa"}
SGLANG_ALGORITHMS = {DRAFT_MODEL: "STANDALONE", EAGLE1: "EAGLE", EAGLE3: "EAGLE3"}
TRTLLM_TYPES = {DRAFT_MODEL: "DraftTarget", EAGLE3: "Eagle3"}


def serve_command(
    engine: str,
    kind: str,
    folder: str | Path,
    target_path: str,
    *,
    draft_len: int,
    dtype: str,
    max_positions: int | None = None,
) -> str:
    """A shell command (for `hf`: Python) that serves `target_path` with the draft in `folder`.

    draft_len: drafted tokens a round. dtype: bfloat16, ... max_positions: longest text, where the draft has fewer
    positions than the target: vLLM drafts past them without an error.
    """
    target, folder = shlex.quote(target_path), str(folder)
    limit = {"vllm": " --max-model-len {}", "sglang": " --context-length {}", "trtllm": " --max_seq_len {}"}
    limits = limit[engine].format(max_positions) if max_positions and engine in limit else ""
    if engine == "speculators":  # the folder names its target and draft length
        return f"vllm serve {shlex.quote(folder)} --dtype {dtype}"
    if engine == "vllm":
        config = json.dumps({"method": VLLM_METHODS[kind], "model": folder, "num_speculative_tokens": draft_len})
        return f"vllm serve {target} --dtype {dtype}{limits} --speculative-config {shlex.quote(config)}"
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} --dtype {dtype}{limits} "
            f"--speculative-algorithm {SGLANG_ALGORITHMS[kind]} --speculative-draft-model-path {shlex.quote(folder)} "
            f"--speculative-num-steps {draft_len} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {draft_len + 1}"
        )
    if engine == "trtllm":
        return f"trtllm-serve {target} --backend pytorch{limits} --config {shlex.quote(f'{folder}/trtllm.yaml')}"
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'target = AutoModelForCausalLM.from_pretrained("{target_path}", dtype="{dtype}")\n'
        f'draft = AutoModelForCausalLM.from_pretrained("{folder}", dtype="{dtype}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}")\n'
        'inputs = tokenizer("The capital of France is", return_tensors="pt")\n'
        "output = target.generate(**inputs, assistant_model=draft, max_new_tokens=64, do_sample=False)\n"
        "print(tokenizer.decode(output[0]))"
    )


def trtllm_yaml(kind: str, folder: str | Path, *, draft_len: int, captured: list[int] | None) -> str:
    """What TensorRT-LLM reads by --config. captured: blocks whose *outputs* the head reads; None for its default."""
    config: dict[str, Any] = {
        "decoding_type": TRTLLM_TYPES[kind],
        "max_draft_len": draft_len,
        "speculative_model": str(folder),
    }
    if captured is not None:
        config["eagle3_layers_to_capture"] = captured
    top = "disable_overlap_scheduler: true\n" if kind == DRAFT_MODEL else ""  # its documentation asks for it
    return top + "speculative_config:\n" + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in config.items())
