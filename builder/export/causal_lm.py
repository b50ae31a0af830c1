"""Trace a transformers language model into an ONNX graph with its KV cache in and out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from onnxscript.optimizer import fold_constants, inline
from onnxscript.rewriter import _DEFAULT_REWRITE_RULES, rewrite
from onnxscript.rewriter.rules.common import slice_split_rule

from trt_lora.builder.export.cache_layout import cache_layouts, failing
from trt_lora.builder.export.component_step import ComponentStep
from trt_lora.builder.export.encoder_decoder import EncoderStep
from trt_lora.builder.export.real_rope import real_rope
from trt_lora.builder.export.static_cache import TRACE_DOMAIN
from trt_lora.builder.export.static_check import static_cache_obstacle
from trt_lora.builder.export.static_step import StaticStep
from trt_lora.builder.export.torch_exponentials import EXPONENTIAL, fold_exponentials
from trt_lora.builder.export.torch_modules import lora_modules, untie_linears
from trt_lora.builder.export.weight_views import reads_weight, transpose_weights
from trt_lora.builder.model_errors import unsupported
from trt_lora.builder.passes.linears import WRAPPER_ATTRIBUTE, traced_paths
from trt_lora.builder.passes.lowering.rms_norms import RMSNorms
from trt_lora.builder.passes.lowering.rotary_embeddings import RotaryEmbeddings
from trt_lora.builder.suppress_output import suppress_output

# The only opset at which every dense architecture tried exports well in float32 and float16: at 23
# the exporter's RMSNorm fusion writes an invalid float16 Gemma.
OPSET = 18
STATIC_OPSET = 24  # TensorScatter and Attention; what is traced at 18 means the same there

# Equal constants are merged up to this many elements: sizes, axes and scalars, but no weight.
_MERGED_ELEMENTS = 8
# One of the rules looks for pairs of nodes anywhere in the graph: a quarter of the export's time.
_RULES = [rule for rule in _DEFAULT_REWRITE_RULES if rule is not slice_split_rule]

Step = StaticStep | EncoderStep | ComponentStep


@dataclass(frozen=True)
class Exported:
    """The graph, and whether the logits need each linear of the model."""

    model: ir.Model
    linears: Mapping[str, bool]  # by module path
    no_effect: tuple[str, ...] = ()  # paths of linears whose weights no output depends on


def export_causal_lm(model: Any, max_len: int) -> Exported:
    """Return the ONNX graph of a `PreTrainedModel`.

    The graph's weights are the model's own memory, transposed ones too.

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
    untie_linears(model)
    exported = export_module(model, StaticStep(model, layouts, max_len))
    RotaryEmbeddings()(exported.model)
    return exported


def export_module(model: Any, step: Step) -> Exported:
    """Return the ONNX graph of a step of a `PreTrainedModel`, of its encoder, or of a component.

    Raises:
        ModelError: it cannot be traced.
    """
    graph = _trace(type(model).__name__, step)
    traced, read = traced_paths(graph), {*graph.graph.initializers}
    with suppress_output():
        _optimize(graph)
    linears = {path: path in traced for path, _ in lora_modules(model)}
    _use_static_opset(graph)
    RMSNorms()(graph)
    dead = (path for path, is_traced in linears.items() if not is_traced)
    no_effect = tuple(path for path in dead if f"{WRAPPER_ATTRIBUTE}.{path}.weight" not in read)
    return Exported(graph, linears, no_effect)


def _trace(name: str, step: Step) -> ir.Model:
    failure = f"{name} cannot be traced by torch.onnx.export"
    with failing(failure, torch.onnx.OnnxExporterError), real_rope(), torch.no_grad():
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
    passes.RemoveUnusedNodesPass()(program.model)
    return program.model


def _optimize(model: ir.Model) -> None:
    """Fold constants, rewrite, and merge equal nodes in place; linears stay apart.

    `torch.onnx.export(optimize=True)` makes one initializer of small weights with equal values, and
    then one node of two linears that read the same x: an adapter for one would be applied to both.
    """
    inline(model)
    for _ in range(2):  # rewriting makes new constants
        fold_constants(model, onnx_shape_inference=True, should_fold=_may_fold)
        fold_exponentials(model.graph)
        transpose_weights(model.graph)
        rewrite(model, _RULES)
    ir.passes.Sequential(
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(size_limit=_MERGED_ELEMENTS),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)


def _may_fold(node: ir.Node) -> bool | None:
    is_left = reads_weight(node) or node.op_type == EXPONENTIAL
    return False if is_left else None  # as the optimizer likes


def _use_static_opset(model: ir.Model) -> None:
    """Move operators of the trace's own domain to the opset that has them."""
    for node in model.graph:
        if node.domain == TRACE_DOMAIN:
            node.domain, node.version = "", None
    model.opset_imports.pop(TRACE_DOMAIN, None)
    model.opset_imports[""] = STATIC_OPSET
