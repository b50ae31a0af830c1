"""A step of a model whose KV cache grows: what the exporter traces for `--kv-cache growing`.

Names and shapes of inputs and outputs are those of `runtime/generation/decoding/step_inputs.py`.
"""

import inspect
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from trt_lora.builder.export.attention import ATTENTION, set_attention
from trt_lora.builder.export.cache_layout import CacheLayout
from trt_lora.builder.export.torch_modules import first_position
from trt_lora.builder.passes.linears import WRAPPER_ATTRIBUTE
from trt_lora.plugins.contract.step import LOGITS
from trt_lora.runtime.generation.decoding.step_inputs import (
    ATTENTION_MASK,
    BATCH,
    INPUT_IDS,
    KEPT,
    LOGITS_TO_KEEP,
    PAST,
    PAST_SEQUENCE,
    POSITION_IDS,
    PRESENT,
    TOKEN_SHAPES,
    TOTAL_SEQUENCE,
    cache_names,
)

_TOKENS = (INPUT_IDS, POSITION_IDS, ATTENTION_MASK, LOGITS_TO_KEEP)  # as the model takes them


class GrowingStep(torch.nn.Module):
    """The model with flat tensors in and out; the cache object lives only inside."""

    def __init__(self, model: Any, layouts: tuple[CacheLayout, ...]) -> None:
        """Wrap a `PreTrainedModel`, and set its attention."""
        super().__init__()
        set_attention(model, ATTENTION)
        setattr(self, WRAPPER_ATTRIBUTE, model)
        self.layouts, self._dtype = layouts, model.dtype
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._first_position = first_position(model)
        self.input_names = [*_TOKENS, *cache_names(PAST, len(layouts))]
        self.output_names = [LOGITS, *cache_names(PRESENT, len(layouts))]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: torch.Tensor,
        past_key_values: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        """Run the model; return logits [batch, kept, vocab] and the longer cache."""
        cache = DynamicCache()
        for layer, (key, value) in enumerate(past_key_values):
            cache.update(key, value, layer)
        if self._first_position:
            position_ids = position_ids + self._first_position
        optional = {POSITION_IDS: position_ids, LOGITS_TO_KEEP: logits_to_keep}
        out = getattr(self, WRAPPER_ATTRIBUTE)(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=cache,
            use_cache=True,
            **{name: value for name, value in optional.items() if name in self._takes},
        )
        logits = out.logits
        if LOGITS_TO_KEEP not in self._takes:
            logits = logits[:, logits_to_keep]
        present = out.past_key_values.layers
        return logits, *(tensor for layer in present for tensor in (layer.keys, layer.values))

    def example_inputs(self) -> tuple[Any, ...]:
        """Return a left-padded batch of two on a cache that is not empty.

        So no dimension is specialised away.
        """
        batch, sequence, past = 2, 3, 5
        input_ids = torch.zeros(batch, sequence, dtype=torch.long)
        position_ids = torch.arange(past, past + sequence).repeat(batch, 1)
        attention_mask = torch.ones(batch, past + sequence, dtype=torch.long)
        attention_mask[0, :2] = 0
        cache = [layout.zeros(batch, past, self._dtype) for layout in self.layouts]
        return input_ids, position_ids, attention_mask, torch.tensor([1, 2]), cache

    def dynamic_shapes(self) -> tuple[Any, ...]:
        """Return which dimensions of the example inputs vary."""
        dynamic = torch.export.Dim.DYNAMIC
        matrix, cache = {0: dynamic, 1: dynamic}, {0: dynamic, 2: dynamic}
        return (matrix, matrix, matrix, {0: dynamic}, [(cache, cache) for _ in self.layouts])

    def dimensions(self, name: str) -> tuple[str | None, ...]:
        """Return the names of the dimensions of an input or output; None where it is a number."""
        if name in TOKEN_SHAPES:
            return TOKEN_SHAPES[name]
        if name == LOGITS:
            return BATCH, KEPT, None
        return BATCH, None, PAST_SEQUENCE if name.startswith(PAST) else TOTAL_SEQUENCE, None
