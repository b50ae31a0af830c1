"""Attention over a cache of fixed size, as one node for a later pass to lower.

Registered with transformers as `trt_lora`. Masks are additive, since some models add them to scores
of their own; `StandardAttention` makes them boolean where only our nodes read them. Outside of a
trace the same is computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES, FalconAttention
from transformers.models.gptj.modeling_gptj import GPTJ_ATTENTION_CLASSES, GPTJAttention

from trt_lora.builder.export.experts import run_experts
from trt_lora.builder.export.static_cache import TRACE_DOMAIN
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import ModelError

ATTENTION = "trt_lora"

_UNSUPPORTED = {"s_aux": "attention sinks"}


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend; the signature is transformers'.

    Args:
        module: the attention layer, for messages.
        query: [batch, heads, s, d].
        key: [batch, kv_heads, t, d].
        value: [batch, kv_heads, t, e].
        attention_mask: [batch, 1, s, t], added to the scores; None: everything is seen.
        scaling: of the scores; 1 / sqrt(d) by default.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        position_bias: added to the mask, broadcast against [batch, heads, s, t].
        options: of transformers' other implementations; without effect in inference but for those
            that are refused.

    Returns:
        [batch, s, heads, e], and no attention weights.

    Raises:
        ModelError: the layer has what changes scores beyond mask, scale and softcap.
    """
    for name, label in _UNSUPPORTED.items():
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} has {label}, which is not supported")
    if attention_mask is None:
        attention_mask = query.new_zeros(query.shape[0], 1, query.shape[2], key.shape[2])
    if position_bias is not None:
        attention_mask = attention_mask + position_bias
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
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.matmul(query * scale, key.transpose(2, 3))
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        attended = torch.matmul(torch.softmax(scores + attention_mask, dim=-1), value)
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
    return seen_mask(mask_function(rows, heads, queries, keys), dtype)


def row_mask(positions: torch.Tensor, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the causal mask [batch, 1, s, keys] of tokens at `positions` [batch, s]."""
    return seen_mask(torch.arange(keys) <= positions[:, None, :, None], dtype)


def seen_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that is added to scores, of the same shape as the boolean `seen`.

    Half of the dtype's minimum stands where nothing may be seen: with all of it, float16 scores
    below -16 would overflow.
    """
    low = torch.full((), torch.finfo(dtype).min / 2, dtype=dtype)
    return torch.where(seen, torch.zeros((), dtype=dtype), low)


def set_attention(model: Any, name: str) -> None:
    """Make a `PreTrainedModel` use an attention, its mask, and experts of that name from now on.

    `set_attn_implementation` leaves models alone that know no attention interface; their masks are
    made by the name in the config all the same.
    """
    with suppress_output():  # it warns of them
        model.set_attn_implementation(name)
        model.set_experts_implementation(name)
    model.config._attn_implementation = name


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
ALL_EXPERTS_FUNCTIONS.register(ATTENTION, run_experts)
# These choose their own attention by name and know no interface; they take our mask.
FALCON_ATTENTION_CLASSES[ATTENTION] = FalconAttention
GPTJ_ATTENTION_CLASSES[ATTENTION] = GPTJAttention
