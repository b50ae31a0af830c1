"""Sizes of a model's KV cache, layer by layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trt_lora.builder.model_errors import one_line, unsupported
from trt_lora.builder.suppress_output import suppress_output

_NEXT_STEP = "docs/supported-models.md lists the architectures that can be built"
_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache of one layer: `[batch, heads, length, key_dim or value_dim]`."""

    heads: int
    key_dim: int
    value_dim: int

    def unset(self, batch: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return keys and values of undefined contents: memory that is never written takes none."""
        dims = (self.key_dim, self.value_dim)
        return [torch.empty(batch, self.heads, length, dim, dtype=dtype) for dim in dims]


@contextmanager
def failing(failure: str, only: type[Exception] = Exception) -> Iterator[None]:
    """Run torch without its own output; what it raises is a ModelError with the root cause."""
    with (
        one_line(failure, _NEXT_STEP, only=only, show_root_cause=True, most_characters=200),
        suppress_output(),
    ):
        yield


def cache_layouts(model: Any) -> tuple[CacheLayout, ...]:
    """Run one token through the model and look, since configs name these sizes in many ways.

    Raises:
        ModelError: the model cannot be run, or has another kind of cache.
    """
    name, token = type(model).__name__, torch.zeros(1, 1, dtype=torch.long)
    with failing(f"{name} cannot be run on a token"), torch.no_grad():
        out = model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=True)
    layers = getattr(getattr(out, "past_key_values", None), "layers", ())
    if not layers or not all(type(layer) in _PLAIN_LAYERS for layer in layers):
        raise unsupported(name, "it has no cache of keys and values in every layer")
    shapes = ((layer.keys.shape, layer.values.shape) for layer in layers)
    return tuple(CacheLayout(keys[1], keys[3], values[3]) for keys, values in shapes)
