"""Which engine serves which kind of draft, and for which targets: read in the engines' sources, because a head that no
engine can load is best known before it is trained.

vLLM 0.32 (run here), SGLang 0.5.23 and TensorRT-LLM's PyTorch backend (read only). A list of families ages: one that an
engine has learned since is let through by export.any_family=true.
"""

from typing import Any

from torch import nn

from models.eagle import EagleHead
from models.medusa import MedusaHeads

ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "hf": "transformers",
    "speculators": "speculators",
}
DRAFT_MODEL, EAGLE1, EAGLE3, MEDUSA = "draft_model", "eagle1", "eagle3", "medusa"

# Prefixes of the target's model_type. vLLM: the class is a SupportsEagle3, as those derived from its Llama are; SGLang:
# it has set_eagle3_layers_to_capture and get_embed_and_head; TensorRT-LLM: it is a SpecDecOneEngineForCausalLM.
EAGLE_FAMILIES = {
    "vllm": (
        "llama", "mistral", "qwen2", "qwen3", "minicpm", "gpt_oss", "hunyuan", "afmoe", "nemotron_h", "deepseek_v2",
        "deepseek_v3", "kimi_k2", "minimax_m2", "gemma4",
    ),
    "sglang": (
        "llama", "mistral", "qwen2", "qwen3", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2",
        "gemma3",
    ),
    "trtllm": ("llama", "qwen3", "gpt_oss", "deepseek_v3", "glm4_moe"),
}  # fmt: skip
# What TensorRT-LLM's PyTorch backend has as a plain model, so as a target or as a draft model; no GPT-2 among them.
TRTLLM_MODELS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma3", "gemma4", "gpt_oss", "deepseek_v3", "phi3", "nemotron",
    "exaone", "glm4_moe", "cohere2",
)  # fmt: skip


def kind_of(draft: nn.Module) -> str:
    """`eagle3`, `eagle1`, `medusa` or `draft_model`."""
    if isinstance(draft, EagleHead):
        return EAGLE3 if draft.config.version == 3 else EAGLE1
    return MEDUSA if isinstance(draft, MedusaHeads) else DRAFT_MODEL


def servable(
    target_config: Any,  # transformers config of the target's language model
    kind: str,  # draft_model | eagle1 | eagle3 | medusa
    engine: str,  # a key of ENGINES
    *,
    draft_config: Any = None,  # of a draft model, where it is known
    any_family: bool = False,
) -> str | None:
    """Why `engine` cannot serve this kind of draft for this target, in a clause; None where it can.

    any_family: trust the engine with families that are not listed here.
    """
    name, family = ENGINES[engine], target_config.model_type
    if kind == DRAFT_MODEL:
        if engine == "speculators":
            return "a draft model is an ordinary folder and no speculators head; use vllm, sglang or hf"
        if engine == "trtllm" and not any_family:
            for config in (target_config, draft_config):
                if config is not None and not config.model_type.startswith(TRTLLM_MODELS):
                    whose = "target" if config is target_config else "draft"
                    return (
                        f"{name}'s PyTorch backend has no {config.model_type} model, which the {whose} is; use vllm, "
                        "sglang or hf"
                    )
        return None
    if kind == MEDUSA:  # vLLM needs nothing of the target but its final state
        return None if engine == "vllm" else f"{name} is not known to load Medusa heads of this layout; use vllm"
    if engine == "hf":
        return f"{name} has no class for {kind} heads; use vllm, sglang, trtllm or speculators"
    if kind == EAGLE1 and engine in ("trtllm", "speculators"):
        return f"{name} knows EAGLE-3 heads only, this one is EAGLE-1; use vllm or sglang"
    if engine == "trtllm" and target_config.num_hidden_layers < 6:
        return f"{name} needs a target of 6 layers or more for EAGLE-3, this one has {target_config.num_hidden_layers}"
    families = EAGLE_FAMILIES["vllm" if engine == "speculators" else engine]  # vLLM serves a speculators folder
    if not any_family and not family.startswith(families):
        who = "vLLM, which serves speculators folders," if engine == "speculators" else name
        return f"{who} serves no {kind} head for a {family} target (for those of {', '.join(families)})"
    return None


def unreadable_taps(tap_ids: tuple[int, ...], engine: str) -> str | None:
    """Why `engine` cannot give an EAGLE-3 head these taps, in a clause; None where it can."""
    name, listed = ENGINES[engine], list(tap_ids)
    if len(tap_ids) != 3 and engine != "speculators":
        return f"{name} reads three taps and this head {len(tap_ids)} ({listed}); train with three in target.tap_ids"
    if 0 in tap_ids and engine in ("sglang", "trtllm"):
        return (
            f"{name} cannot capture tap 0, the embedding's output (taps {listed}); use vllm, or train with taps of at "
            "least 1"
        )
    return None


def unservable_lines(
    target_config: Any, kind: str, *, draft_config: Any = None, tap_ids: tuple[int, ...] | None = None
) -> list[str]:
    """A line for each serving engine that cannot serve such a draft: told when its training starts.

    tap_ids: of an EAGLE-3 head.
    """
    reasons = (
        servable(target_config, kind, engine, draft_config=draft_config)
        or (unreadable_taps(tap_ids, engine) if tap_ids else None)
        for engine in EAGLE_FAMILIES
    )
    return [f"not servable everywhere: {reason}" for reason in reasons if reason]
