"""Reasons why a model cannot be an engine, from its classes and config alone.

No weight is read, so that a model on the meta device will do.
"""

from collections.abc import Callable, Iterator
from typing import Any

from trt_lora.plugins.errors import ModelError

_NEXT_STEP = "pass a dense decoder-only model; docs/supported-models.md lists them"


def check_supported(model: Any) -> None:
    """Check that a `PreTrainedModel` is a dense decoder with plain attention.

    Raises:
        ModelError: it is not; the message says why.
    """
    for reason in _REASONS:
        if words := reason(model):
            raise ModelError(f"{type(model).__name__} cannot be built: {words}; {_NEXT_STEP}")


def _encoder(model: Any) -> str:
    if model.config.is_encoder_decoder:
        return "it has an encoder, and its decoder attends to that (cross attention)"
    return ""


def _not_causal(model: Any) -> str:
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
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


def _class_names(model: Any) -> Iterator[str]:
    return (type(module).__name__ for module in model.modules())


_REASONS: tuple[Callable[[Any], str], ...] = (
    _encoder,
    _not_causal,
    _recurrent,
    _experts,
    _sinks,
)
