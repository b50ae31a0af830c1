"""Unsupported models, by their modules and config.

No weight is read, so that a model on the meta device will do.
"""

from collections.abc import Iterator
from typing import Any

import torch

from trt_lora.builder.checkpoint.checkpoint import ENCODER_DECODERS
from trt_lora.builder.checks.config_fields import ENCODER, STATE
from trt_lora.builder.checks.model_config import ropes
from trt_lora.builder.export.experts import experts_obstacle
from trt_lora.builder.model_errors import unsupported

_CROSS_ATTENTION = ("encoder_attn", "cross_attn", "crossattention")
# In float16 they run another branch where a value is infinite.
_ASK_FOR_INFINITIES = ("bart", "marian")
_PLAIN_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def check_supported(model: Any) -> None:
    """Check that a `PreTrainedModel` is a decoder with plain attention, dense or with experts.

    Raises:
        ModelError: it is not; the message says why.
    """
    if reasons := [*_reasons(model)]:
        raise unsupported(type(model).__name__, "; ".join(reasons))


def _reasons(model: Any) -> Iterator[str]:
    modules, text = dict(model.named_modules()), model.config.get_text_config()
    if type(model).__name__ in ENCODER_DECODERS.values():
        if model.dtype == torch.float16 and (reason := _float16_obstacle(model)):
            yield f"{reason}; pass --dtype bfloat16 for a GPU, or float32"
        return
    if model.config.is_encoder_decoder or any(path.endswith(_CROSS_ATTENTION) for path in modules):
        yield ENCODER
    decoder = model.get_decoder()  # what sees images or sound need not be causal
    if any(getattr(module, "is_causal", True) is False for module in decoder.modules()):
        yield "it is not a decoder: every token sees those after it (is_decoder is not true)"
    if type(model)._is_stateful:
        yield STATE
    experts = [module for module in modules.values() if type(module).__name__.endswith("Experts")]
    obstacles = dict.fromkeys(filter(None, map(experts_obstacle, experts)))
    yield from (f"it has {obstacle}" for obstacle in obstacles)
    if any("sinks" in dict(m.named_parameters(recurse=False)) for m in modules.values()):
        yield "its attention has sinks"
    if other := sorted(set(getattr(text, "layer_types", None) or ()) - _PLAIN_ATTENTION):
        yield f"its config has layers of type {', '.join(other)}"
    if any(r.get("rope_type") == "dynamic" for r in ropes(getattr(text, "rope_parameters", None))):
        yield "its rope is dynamic: frequencies change with the length of a sequence"


def _float16_obstacle(model: Any) -> str:
    """Why an encoder-decoder cannot be built in float16; empty if it can."""
    if model._keep_in_fp32_modules:
        return f"{', '.join(model._keep_in_fp32_modules)} would overflow in float16"
    is_asking = model.config.model_type in _ASK_FOR_INFINITIES
    return "its encoder looks for infinities in float16, as no graph can" if is_asking else ""
