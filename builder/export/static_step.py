"""A step of a model whose KV cache has a fixed size and is written in place.

Names and shapes of inputs and outputs are those of `runtime/generation/decoding/step_inputs.py`.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trt_lora.builder.export.attention import ATTENTION, set_attention
from trt_lora.builder.export.cache_layout import CacheLayout
from trt_lora.builder.export.static_cache import RowCache
from trt_lora.builder.export.torch_modules import first_position
from trt_lora.builder.passes.linears import WRAPPER_ATTRIBUTE
from trt_lora.plugins.contract.step import CACHE, LOGITS, NEW_CACHE
from trt_lora.runtime.generation.decoding.step_inputs import BATCH, TOKEN_SHAPES, cache_names


class StaticStep(torch.nn.Module):
    """The model with flat tensors in and out; the cache object lives only inside."""

    def __init__(self, model: Any, layouts: tuple[CacheLayout, ...], max_len: int) -> None:
        """Wrap a `PreTrainedModel`, and set its attention.

        Args:
            model: in evaluation mode.
            layouts: of its cache.
            max_len: tokens that a row of the cache has room for.
        """
        super().__init__()
        set_attention(model, ATTENTION)
        setattr(self, WRAPPER_ATTRIBUTE, model)
        self.layouts, self.dtype, self._max_len = layouts, model.dtype, max_len
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._first_position = first_position(model)
        self.input_names = [*TOKEN_SHAPES, *cache_names(CACHE, len(layouts))]
        self.output_names = [LOGITS, *cache_names(NEW_CACHE, len(layouts))]

    def forward(
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        kept: torch.Tensor,
        bound: torch.Tensor,
        caches: list[list[torch.Tensor]],  # of every layer, keys and values
    ) -> tuple[torch.Tensor, ...]:
        """Run the model; return logits [kept, vocab] and the caches as written."""
        new_tokens = input_ids.shape[1]
        positions = lengths[:, None] + torch.arange(new_tokens)
        if self._first_position:
            positions = positions + self._first_position
        cache = RowCache(caches, lengths, bound.shape[0], new_tokens)
        optional = {"position_ids": positions} if self._takes_positions else {}
        with self._only(kept):
            out = getattr(self, WRAPPER_ATTRIBUTE)(
                input_ids=input_ids, past_key_values=cache, use_cache=True, **optional
            )
        return out.logits[0], *cache.written

    @contextmanager
    def _only(self, kept: torch.Tensor) -> Iterator[None]:
        """Let the output head see the kept positions alone, as a batch of one."""

        def choose(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            del module
            hidden, *others = args
            return hidden.reshape(1, -1, hidden.shape[-1])[:, kept], *others

        head = getattr(self, WRAPPER_ATTRIBUTE).get_output_embeddings()
        handle = head.register_forward_pre_hook(choose)
        try:
            yield
        finally:
            handle.remove()

    def example_inputs(self) -> tuple[Any, ...]:
        """Return two rows of different lengths, so that no dimension is specialised away."""
        batch, sequence, bound = 2, 3, min(17, self._max_len - 1)
        # Tracing looks at shapes alone.
        caches = [layout.unset(batch, self._max_len, self.dtype) for layout in self.layouts]
        return (
            torch.zeros(batch, sequence, dtype=torch.long),
            torch.tensor([2, 5]),
            torch.tensor([0, 4, 5, 1]),
            torch.zeros(bound, dtype=torch.bool),
            caches,
        )

    def dynamic_shapes(self) -> tuple[Any, ...]:
        """Return the names of those dimensions of the example inputs that vary."""
        tokens = [dict(enumerate(shape)) for shape in TOKEN_SHAPES.values()]
        return *tokens, [[{0: BATCH}, {0: BATCH}] for _ in self.layouts]
