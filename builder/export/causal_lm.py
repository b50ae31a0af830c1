"""Trace a transformers causal language model into an ONNX graph with its KV cache in and out.

Names and shapes of inputs and outputs are those of `runtime/generation/step_inputs.py`.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from trt_lora.builder.export.dimension_names import NameDimensions
from trt_lora.builder.export.first_position import first_position
from trt_lora.builder.export.optimize import optimize
from trt_lora.builder.export.real_rope import real_rope
from trt_lora.builder.model_errors import one_line, unsupported
from trt_lora.builder.passes.linears import (
    WRAPPER_ATTRIBUTE,
    module_linears,
    traced_paths,
    untie_linears,
)
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.runtime.generation.step_inputs import (
    ATTENTION_MASK,
    INPUT_IDS,
    LOGITS,
    LOGITS_TO_KEEP,
    PAST,
    POSITION_IDS,
    PRESENT,
    cache_names,
)

# The only opset at which every dense architecture tried exports well in float32 and float16: at 23
# the exporter's RMSNorm fusion writes an invalid float16 Gemma.
OPSET = 18

_TOKENS = (INPUT_IDS, POSITION_IDS, ATTENTION_MASK, LOGITS_TO_KEEP)  # as the model takes them

_REASON_CHARACTERS = 200
_NEXT_STEP = "docs/supported-models.md lists the architectures that can be built"
_PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache of one layer: `[batch, heads, past_sequence, key_dim or value_dim]`."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Exported:
    """The graph, its cache layer by layer, and whether the logits need each linear of the model."""

    model: ir.Model
    cache: tuple[CacheLayout, ...]
    linears: Mapping[str, bool]  # by module path


class _CausalLM(torch.nn.Module):
    """The model with flat tensors in and out; the cache object lives only inside."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        setattr(self, WRAPPER_ATTRIBUTE, model)
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._first_position = first_position(model)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: torch.Tensor,
        past_key_values: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
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


def export_causal_lm(model: Any) -> Exported:
    """Return the ONNX graph of a `PreTrainedModel`.

    The graph's weights are the model's own memory, or transposed copies of it.

    Raises:
        ModelError: the model cannot be run or traced, or has another kind of cache.
    """
    name = type(model).__name__
    cache = _cache_layouts(model.eval())
    untie_linears(model)
    tracing = one_line(
        f"{name} cannot be traced by torch.onnx.export",
        _NEXT_STEP,
        only=torch.onnx.OnnxExporterError,
        show_root_cause=True,
        most_characters=_REASON_CHARACTERS,
    )
    with tracing, suppress_output(), real_rope(), torch.no_grad():
        program = torch.onnx.export(
            _CausalLM(model),
            _example_inputs(cache, model.dtype),
            dynamo=True,
            dynamic_shapes=_dynamic_shapes(len(cache)),
            input_names=[*_TOKENS, *cache_names(PAST, len(cache))],
            output_names=[LOGITS, *cache_names(PRESENT, len(cache))],
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
    assert program is not None  # None only from the exporter that dynamo=True replaces
    RemoveUnusedNodesPass()(program.model)
    traced = traced_paths(program.model)
    with suppress_output():
        optimize(program.model)
    NameDimensions()(program.model)
    linears = {path: path in traced for path, _ in module_linears(model)}
    return Exported(program.model, cache, linears)


def _cache_layouts(model: Any) -> tuple[CacheLayout, ...]:
    """Run one token through the model and look, since configs name these sizes in many ways."""
    name, token = type(model).__name__, torch.zeros(1, 1, dtype=torch.long)
    running = one_line(
        f"{name} cannot be run on a token",
        _NEXT_STEP,
        show_root_cause=True,
        most_characters=_REASON_CHARACTERS,
    )
    with running, suppress_output(), torch.no_grad():
        out = model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=True)
    layers = getattr(getattr(out, "past_key_values", None), "layers", ())
    if not layers or not all(type(layer) in _PLAIN_LAYERS for layer in layers):
        raise unsupported(name, "it has no cache of keys and values in every layer")
    return tuple(_cache_layout(layer.keys.shape, layer.values.shape) for layer in layers)


def _cache_layout(keys: torch.Size, values: torch.Size) -> CacheLayout:
    return CacheLayout(heads=keys[1], key_dim=keys[3], value_dim=values[3])


def _example_inputs(layouts: tuple[CacheLayout, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """A left-padded batch of two on a cache that is not empty: no dimension is specialised away."""
    batch, sequence, past = 2, 3, 5
    input_ids = torch.zeros(batch, sequence, dtype=torch.long)
    position_ids = torch.arange(past, past + sequence).repeat(batch, 1)
    attention_mask = torch.ones(batch, past + sequence, dtype=torch.long)
    attention_mask[0, :2] = 0
    cache = [
        (
            torch.zeros(batch, layout.heads, past, layout.key_dim, dtype=dtype),
            torch.zeros(batch, layout.heads, past, layout.value_dim, dtype=dtype),
        )
        for layout in layouts
    ]
    return input_ids, position_ids, attention_mask, torch.tensor([1, 2]), cache


def _dynamic_shapes(layers: int) -> tuple[Any, ...]:
    dynamic = torch.export.Dim.DYNAMIC
    matrix, cache = {0: dynamic, 1: dynamic}, {0: dynamic, 2: dynamic}
    return (matrix, matrix, matrix, {0: dynamic}, [(cache, cache) for _ in range(layers)])
