"""Trace a transformers causal language model into an ONNX graph with its KV cache in and out.

Inputs   input_ids, position_ids [batch, sequence], attention_mask [batch, total_sequence],
         logits_to_keep [kept] (which positions get logits: decoding needs the last one only),
         past_key_values.<layer>.{key,value} [batch, kv_heads, past_sequence, head_dim]
Outputs  logits [batch, kept, vocab], present.<layer>.{key,value} [.., total_sequence, head_dim]
"""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from trt_lora.builder.linears import WRAPPER_ATTRIBUTE
from trt_lora.builder.quiet import quiet
from trt_lora.builder.symbols import name_symbols
from trt_lora.plugins.errors import ModelError

# The only opset at which every dense architecture tried exports well in float32 and float16: at 23
# the exporter's RMSNorm fusion writes an invalid float16 Gemma.
OPSET = 18


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache of one layer: `[batch, heads, past_sequence, head_dim]`, keys and values."""

    heads: int
    head_dim: int


class _CausalLM(torch.nn.Module):
    """The model with flat tensors in and out; the cache object lives only inside."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        setattr(self, WRAPPER_ATTRIBUTE, model)

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
        out = getattr(self, WRAPPER_ATTRIBUTE)(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            logits_to_keep=logits_to_keep,
            use_cache=True,
        )
        present = out.past_key_values.layers
        return out.logits, *(tensor for layer in present for tensor in (layer.keys, layer.values))


def export_causal_lm(model: Any) -> tuple[ir.Model, tuple[CacheLayout, ...]]:
    """Return the ONNX graph of a `PreTrainedModel` and its cache, layer by layer.

    The graph's weights are the model's own memory, or transposed copies of it.

    Raises:
        ModelError: the exporter cannot trace the model.
    """
    layouts = _cache_layouts(model)
    try:
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                _CausalLM(model.eval()),
                _example_inputs(layouts, model.dtype),
                dynamo=True,
                dynamic_shapes=_dynamic_shapes(len(layouts)),
                input_names=_input_names(len(layouts)),
                output_names=["logits", *_cache_names("present", len(layouts))],
                opset_version=OPSET,
                optimize=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ModelError(
            f"torch.onnx.export cannot trace {type(model).__name__}: {error}. "
            "Dense decoder-only models are supported; see the README's list"
        ) from error
    assert program is not None  # None only from the exporter that dynamo=True replaces
    graph = program.model
    name_symbols(graph)
    return graph, layouts


def _cache_layouts(model: Any) -> tuple[CacheLayout, ...]:
    """Run one token through the model and look, since configs name these sizes in many ways."""
    with torch.no_grad():
        out = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=True)
    layers = getattr(getattr(out, "past_key_values", None), "layers", ())
    if not layers or not all(isinstance(layer, DynamicLayer) for layer in layers):
        raise ModelError(
            f"{type(model).__name__} has no cache of keys and values in every layer; "
            "decoder-only models with plain attention are supported"
        )
    return tuple(CacheLayout(layer.keys.shape[1], layer.keys.shape[3]) for layer in layers)


def _example_inputs(layouts: tuple[CacheLayout, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """A left-padded batch of two on a cache that is not empty: no dimension is specialised away."""
    batch, sequence, past = 2, 3, 5
    input_ids = torch.zeros(batch, sequence, dtype=torch.long)
    position_ids = torch.arange(past, past + sequence).repeat(batch, 1)
    attention_mask = torch.ones(batch, past + sequence, dtype=torch.long)
    attention_mask[0, :2] = 0
    cache = [
        (
            torch.zeros(batch, layout.heads, past, layout.head_dim, dtype=dtype),
            torch.zeros(batch, layout.heads, past, layout.head_dim, dtype=dtype),
        )
        for layout in layouts
    ]
    return input_ids, position_ids, attention_mask, torch.tensor([1, 2]), cache


def _dynamic_shapes(layers: int) -> tuple[Any, ...]:
    dynamic = torch.export.Dim.DYNAMIC
    matrix, cache = {0: dynamic, 1: dynamic}, {0: dynamic, 2: dynamic}
    return (matrix, matrix, matrix, {0: dynamic}, [(cache, cache) for _ in range(layers)])


def _input_names(layers: int) -> list[str]:
    tokens = ["input_ids", "position_ids", "attention_mask", "logits_to_keep"]
    return [*tokens, *_cache_names("past_key_values", layers)]


def _cache_names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
