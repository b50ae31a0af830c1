"""Unsupported models, by their modules and config.

No weight is read, so that a model on the meta device will do.
"""

from collections.abc import Callable, Iterator
from typing import Any

from trt_lora.builder.model_errors import unsupported

_CROSS_ATTENTION = ("encoder_attn", "cross_attn", "crossattention")
_PLAIN_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def check_supported(model: Any) -> None:
    """Check that a `PreTrainedModel` is a dense decoder with plain attention.

    Raises:
        ModelError: it is not; the message says why.
    """
    for reason in _REASONS:
        if words := reason(model):
            raise unsupported(type(model).__name__, words)


def _cross_attention(model: Any) -> str:
    names = [name for name, _ in model.named_modules() if name.endswith(_CROSS_ATTENTION)]
    if model.config.is_encoder_decoder or names:
        return "its layers attend to an encoder (cross attention)"
    return ""


def _not_causal(model: Any) -> str:
    decoder = model.get_decoder()  # what sees images or sound need not be causal
    if any(getattr(module, "is_causal", True) is False for module in decoder.modules()):
        return "it is not a decoder: every token sees those after it (is_decoder is not true)"
    return ""


def _recurrent(model: Any) -> str:
    if type(model)._is_stateful:
        return "layers keep a state (state space or linear attention), not keys and values"
    return ""


def _experts(model: Any) -> str:
    names = [name for name in _class_names(model) if name.endswith("Experts")]
    return f"it is a mixture of experts ({names[0]})" if names else ""


def _sinks(model: Any) -> str:
    if any("sinks" in dict(module.named_parameters(recurse=False)) for module in model.modules()):
        return "its attention has sinks"
    return ""


def _layer_types(model: Any) -> str:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    other = sorted(set(kinds) - _PLAIN_ATTENTION)
    return f"its config has layers of type {', '.join(other)}" if other else ""


def _dynamic_rope(model: Any) -> str:
    if "dynamic" in _rope_types(getattr(model.config.get_text_config(), "rope_parameters", None)):
        return "its rope is dynamic: frequencies change with the length of a sequence"
    return ""


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the type of one set of rope parameters, or of one set for each type of layer."""
    if isinstance(parameters, dict):
        yield str(parameters.get("rope_type"))
        for inner in parameters.values():
            yield from _rope_types(inner)


def _class_names(model: Any) -> Iterator[str]:
    return (type(module).__name__ for module in model.modules())


_REASONS: tuple[Callable[[Any], str], ...] = (
    _cross_attention,
    _not_causal,
    _recurrent,
    _experts,
    _sinks,
    _layer_types,
    _dynamic_rope,
)
