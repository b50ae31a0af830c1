"""Trace a transformers causal language model into an ONNX graph with its KV cache in and out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trt_lora.builder.export.cache_layout import (
    NEXT_STEP,
    REASON_CHARACTERS,
    CacheLayout,
    cache_layouts,
)
from trt_lora.builder.export.dimension_names import NameDimensions
from trt_lora.builder.export.optimize import optimize
from trt_lora.builder.export.real_rope import real_rope
from trt_lora.builder.export.static_cache import TRACE_DOMAIN
from trt_lora.builder.export.static_check import static_cache_obstacle
from trt_lora.builder.export.static_step import StaticStep
from trt_lora.builder.export.torch_modules import module_linears, untie_linears
from trt_lora.builder.model_errors import one_line, unsupported
from trt_lora.builder.passes.linears import traced_paths
from trt_lora.builder.passes.lowering.rms_norms import RMSNorms
from trt_lora.builder.passes.lowering.rotary_embeddings import RotaryEmbeddings
from trt_lora.builder.suppress_output import suppress_output

# The only opset at which every dense architecture tried exports well in float32 and float16: at 23
# the exporter's RMSNorm fusion writes an invalid float16 Gemma.
OPSET = 18
STATIC_OPSET = 24  # TensorScatter and Attention; what is traced at 18 means the same there


@dataclass(frozen=True)
class Exported:
    """The graph, its cache layer by layer, and whether the logits need each linear of the model."""

    model: ir.Model
    cache: tuple[CacheLayout, ...]
    linears: Mapping[str, bool]  # by module path


def export_causal_lm(model: Any, max_len: int) -> Exported:
    """Return the ONNX graph of a `PreTrainedModel`.

    The graph's weights are the model's own memory, or transposed copies of it.

    Args:
        model: on the CPU.
        max_len: tokens that a row of the cache has room for.

    Raises:
        ModelError: the model cannot be run or traced, has another kind of cache, or does not answer
            rows of different lengths as it answers each by itself.
    """
    layouts = cache_layouts(model.eval())
    if obstacle := static_cache_obstacle(model, layouts):
        raise unsupported(type(model).__name__, f"its KV cache cannot be static: {obstacle}")
    step = StaticStep(model, layouts, max_len)
    untie_linears(model)
    graph = _trace(type(model).__name__, step)
    traced = traced_paths(graph)
    with suppress_output():
        optimize(graph)
    NameDimensions(step.dimensions)(graph)
    linears = {path: path in traced for path, _ in module_linears(model)}
    _use_static_opset(graph)
    RMSNorms()(graph)
    RotaryEmbeddings()(graph)
    return Exported(graph, layouts, linears)


def _trace(name: str, step: StaticStep) -> ir.Model:
    tracing = one_line(
        f"{name} cannot be traced by torch.onnx.export",
        NEXT_STEP,
        only=torch.onnx.OnnxExporterError,
        show_root_cause=True,
        most_characters=REASON_CHARACTERS,
    )
    with tracing, suppress_output(), real_rope(), torch.no_grad():
        program = torch.onnx.export(
            step,
            step.example_inputs(),
            dynamo=True,
            dynamic_shapes=step.dynamic_shapes(),
            input_names=step.input_names,
            output_names=step.output_names,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
        )
    assert program is not None  # None only from the exporter that dynamo=True replaces
    RemoveUnusedNodesPass()(program.model)
    return program.model


def _use_static_opset(model: ir.Model) -> None:
    """Move operators of the trace's own domain to the opset that has them."""
    for node in model.graph:
        if node.domain == TRACE_DOMAIN:
            node.domain, node.version = "", None
    model.opset_imports.pop(TRACE_DOMAIN, None)
    model.opset_imports[""] = STATIC_OPSET
