"""Attention of decoding steps: few queries, keys and values shared by groups of query heads.

A single query a head: the heads of a group become the rows of one product, which reads their keys once; torch's kernel
otherwise walks over them for every head. Several queries: on a CPU the kernel takes grouped heads as they are, where
transformers would repeat keys and values in memory at every step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

DECODING = "draftsmith_decoding"


def attend(
    query: Tensor,  # (B, H, T, Dh)
    key: Tensor,  # (B, Hkv, S, Dh)
    value: Tensor,  # (B, Hkv, S, Dv)
    attention_mask: Tensor | None,  # (B or 1, 1, T, S), None: causal over T, or a single query that sees all
    scale: float | None = None,
) -> Tensor:  # (B, H, T, Dv)
    """Scaled dot-product attention."""
    num_heads, num_queries = query.shape[1], query.shape[2]
    groups = num_heads // key.shape[1]
    is_causal = attention_mask is None and num_queries > 1
    is_grouped = groups > 1
    if is_grouped and num_queries == 1:
        grouped = query.unflatten(1, (-1, groups)).squeeze(3)  # (B, Hkv, H / Hkv, Dh)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scale)
        return out.flatten(1, 2)[:, :, None]
    if is_grouped and (query.is_cuda or torch.is_grad_enabled()):  # kernels that want equal heads
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        is_grouped = False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
    )


def _decoding_attention(
    module: nn.Module,
    query: Tensor,  # (B, H, T, Dh)
    key: Tensor,  # (B, Hkv, S, Dh)
    value: Tensor,  # (B, Hkv, S, Dv)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # (B, T, H, Dv)
    """`attend` as an attention function of transformers; what it does not know goes to theirs."""
    is_plain = not dropout and kwargs.get("position_bias") is None and kwargs.get("softcap") is None
    if not is_plain or kwargs.get("is_causal") is False:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(DECODING, _decoding_attention)
AttentionMaskInterface.register(DECODING, sdpa_mask)


@contextmanager
def decoding_attention(model: nn.Module) -> Iterator[None]:
    """Forwards of a model on the CPU, where it uses SDPA, attend by `attend`. Its config is as before afterwards.

    Models without transformers' attention interface (Falcon) look the name up themselves, so they keep theirs.
    """
    config = model.config.get_text_config()
    has_interface = getattr(model, "_supports_attention_backend", False)
    if config._attn_implementation != "sdpa" or model.device.type != "cpu" or not has_interface:
        yield
        return
    config._attn_implementation = DECODING
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
