"""Attention of exported models: grouped query heads without copying keys and values.

Registered with transformers as `trt_lora`. The exporter's own translation of scaled dot product
attention repeats keys and values for every query head, and spends nine nodes on transposing the
keys and two on rows that may attend to nothing; here the query heads of a group are folded
into the query length, and such rows stay finite.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES, FalconAttention
from transformers.models.gpt_neo.modeling_gpt_neo import (
    GPT_NEO_ATTENTION_CLASSES,
    GPTNeoSelfAttention,
)
from transformers.models.gptj.modeling_gptj import GPTJ_ATTENTION_CLASSES, GPTJAttention

from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import ModelError

ATTENTION = "trt_lora"

_UNSUPPORTED = {"s_aux": "attention sinks", "position_bias": "a position bias"}


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
    """Attend; the signature is transformers'.

    Args:
        module: the attention layer; unused.
        query: [batch, heads, s, d].
        key: [batch, kv_heads, t, d].
        value: [batch, kv_heads, t, e].
        attention_mask: [batch, 1, s, t], added to the scores.
        scaling: of the scores; 1 / sqrt(d) by default.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        options: of transformers' other implementations; without effect in inference but for those
            that are refused.

    Returns:
        [batch, s, heads, e], and no attention weights.
    """
    refuse_unsupported(module, options)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    attended = written_out(query, key, value, attention_mask, scale, softcap)
    return attended.transpose(1, 2), None


def refuse_unsupported(module: torch.nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse what changes scores beyond mask, scale and softcap, with ModelError."""
    for name, label in _UNSUPPORTED.items():
        if options.get(name) is not None:
            raise ModelError(f"{type(module).__name__} has {label}, which is not supported")


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Return attention [batch, heads, s, e] in matrix products; arguments as in `_attention`."""
    batch, heads, length, size = query.shape
    groups = key.shape[1]
    folded = query.reshape(batch, groups, heads // groups * length, size)
    scores = torch.matmul(folded * scale, key.transpose(2, 3))
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + _fold_mask(mask, heads // groups), dim=-1)
    return torch.matmul(weights, value).reshape(batch, heads, length, value.shape[3])


def _fold_mask(mask: torch.Tensor, queries_per_group: int) -> torch.Tensor:
    """Repeat a mask [batch, 1, s, t] for the query heads of a group: [batch, 1, g * s, t]."""
    if queries_per_group == 1:
        return mask
    return mask.repeat(1, 1, queries_per_group, 1)


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Half of the dtype's minimum where nothing may be seen.

    With all of it, float16 scores below -16 would overflow, and a row of padding would be NaN.
    """
    return eager_mask(*args, **kwargs) * 0.5


def register_attention(name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Let transformers find an attention, and the mask that it takes, by a name."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    # These choose their own attention by name and know no interface; they take our mask.
    FALCON_ATTENTION_CLASSES[name] = FalconAttention
    GPT_NEO_ATTENTION_CLASSES[name] = GPTNeoSelfAttention
    GPTJ_ATTENTION_CLASSES[name] = GPTJAttention


def set_attention(model: Any, name: str) -> None:
    """Make a `PreTrainedModel` use an attention, and its mask, from now on.

    `set_attn_implementation` leaves models alone that know no attention interface; their masks are
    made by the name in the config all the same.
    """
    with suppress_output():  # it warns of them
        model.set_attn_implementation(name)
    model.config._attn_implementation = name


register_attention(ATTENTION, _attention, _mask)
