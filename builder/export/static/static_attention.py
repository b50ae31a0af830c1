"""Attention over a cache of fixed size, as one node for a later pass to lower.

Registered with transformers as `trt_lora_static`. Masks are additive, since some models add them
to scores of their own; `LowerAttention` makes them boolean where only our nodes read them.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function

from trt_lora.builder.export.attention import (
    refuse_unsupported,
    register_attention,
    written_out,
)
from trt_lora.builder.export.static.static_cache import TRACE_DOMAIN

STATIC_ATTENTION = "trt_lora_static"


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; arguments and result are those of `attention._attention`."""
    refuse_unsupported(module, options)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    if torch.compiler.is_exporting():
        attended = torch.onnx.ops.symbolic(
            f"{TRACE_DOMAIN}::Attention",
            (query, key, value, attention_mask),
            {"scale": scale, "softcap": float(softcap or 0)},
            dtype=query.dtype,
            shape=(*query.shape[:3], value.shape[3]),
            version=1,
        )
    else:
        attended = written_out(query, key, value, attention_mask, scale, softcap)
    return attended.transpose(1, 2), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> torch.Tensor:
    """Return the mask [batch, 1, q, kv], added to scores; the signature is transformers'.

    Every row has positions of its own: `q_offset` is [batch, 1, 1, 1].
    """
    del options  # vmap, devices, and masks for padding, which a row of its own length has none of
    rows = torch.arange(batch_size)[:, None, None, None]
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    queries = torch.arange(q_length)[None, None, :, None] + q_offset
    keys = torch.arange(kv_length)[None, None, None, :] + kv_offset
    seen = mask_function(rows, heads, queries, keys)
    low = torch.full((), torch.finfo(dtype).min / 2, dtype=dtype)
    return torch.where(seen, torch.zeros((), dtype=dtype), low)


register_attention(STATIC_ATTENTION, _attention, _mask)
