"""A KV cache of fixed size, written in place at a row's own length.

`update` traces one `TensorScatter` (ONNX opset 24) for keys and one for values, and hands back the
first `bound` positions of what was written. Without a trace it computes the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# Operators of later opsets are traced in a domain of their own, and moved when the trace is over.
TRACE_DOMAIN = "trt_lora.opset24"


class RowCache(Cache):
    """Layers of caches whose rows have lengths of their own."""

    def __init__(
        self,
        caches: Sequence[Sequence[torch.Tensor]],
        lengths: torch.Tensor,
        bound: int,
        new_tokens: int,
    ) -> None:
        """Describe a step.

        Args:
            caches: of every layer, keys and values [batch, kv_heads, max_len, dim].
            lengths: tokens in each row [batch], which is where the new ones are written.
            bound: positions looked at, as many as the longest row has after the step at least.
            new_tokens: of every row.
        """
        self._rows = [_RowLayer(pair, lengths, bound, bound - new_tokens) for pair in caches]
        super().__init__(layers=list(self._rows))
        self._offsets = lengths[:, None, None, None]

    @property
    def written(self) -> list[torch.Tensor]:
        """The caches after the step: keys and values of every layer."""
        return [tensor for row in self._rows for tensor in row.pair]

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the first new position of each row [batch, 1, 1, 1], for the mask function."""
        del layer_idx  # the same in every layer; the name is transformers'
        return self._offsets


class _RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # its subclasses' hook
    def __init__(
        self, pair: Sequence[torch.Tensor], lengths: torch.Tensor, bound: int, past: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pair = self.keys, self.values = pair
        self.is_initialized = True
        self._lengths, self._bound, self._past = lengths, bound, past

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the layer has its memory."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values; return those that may be looked at."""
        del args, kwargs  # of transformers' other caches
        new = (key_states, value_states)
        keys, values = (
            write_rows(old, added, self._lengths) for old, added in zip(self.pair, new, strict=True)
        )
        self.pair = self.keys, self.values = keys, values
        return keys[:, :, : self._bound], values[:, :, : self._bound]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there are, and the position of the first."""
        del query_length
        return self._bound, 0

    def get_seq_length(self) -> int:
        """Return what a model that knows one length for all rows takes for the past."""
        return self._past

    def get_max_length(self) -> int:
        """Return the size of the cache."""
        return int(self.pair[0].shape[2])


def write_rows(cache: torch.Tensor, new: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return `cache` [batch, heads, max_len, dim] with `new` [batch, heads, s, dim] written."""
    if torch.compiler.is_exporting():
        return torch.onnx.ops.symbolic(
            f"{TRACE_DOMAIN}::TensorScatter",
            (cache, new.to(cache.dtype), lengths),
            {"axis": -2, "mode": "linear"},
            dtype=cache.dtype,
            shape=cache.shape,
            version=1,
        )
    places = lengths[:, None, None, None] + torch.arange(new.shape[2])[:, None]
    return cache.scatter(2, places.expand(new.shape), new)
