"""Save the ONNX files of an engine: the standard one, and ONNX Runtime's own over its weights."""

from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.passes.lowering.grouped_query_attention import GroupQueryAttention
from trt_lora.builder.passes.lowering.standard_attention import StandardAttention
from trt_lora.runtime.generation.decoding.static_inputs import CACHE, CACHE_LENGTH, NEW_CACHE
from trt_lora.runtime.manifest import ONNX_CPU_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE


def save_graphs(model: ir.Model, work: Path) -> None:
    """Write the files of an exported graph into the directory `work`.

    A static cache has a second file over the same weights, `ONNX_CPU_FILE`: its attention is ONNX
    Runtime's own where that has an operator for it.

    Args:
        model: with LoRA inputs; its attention is lowered in place.
        work: an engine directory in the making.
    """
    own = model.clone()
    StandardAttention()(model)
    ir.save(model, work / ONNX_FILE, external_data=ONNX_WEIGHTS_FILE)
    if not any(str(value.name).startswith(CACHE) for value in own.graph.inputs):
        return  # the cache grows
    GroupQueryAttention()(own)
    StandardAttention()(own)  # of layers that the operator cannot express
    _free_cache_length(own)
    _share_weights(own, ir.load(work / ONNX_FILE))
    ir.save(own, work / ONNX_CPU_FILE)


def _free_cache_length(model: ir.Model) -> None:
    """Let whoever runs the file choose the length of the cache, up to the engine's.

    For TensorRT it is fixed: it writes to no other in place.
    """
    for value in (*model.graph.inputs, *model.graph.outputs):
        if str(value.name).startswith((CACHE, NEW_CACHE)):
            assert value.shape is not None  # the export names them all
            value.shape = ir.Shape([*value.shape[:2], CACHE_LENGTH, value.shape[3]])


def _share_weights(model: ir.Model, saved: ir.Model) -> None:
    """Let initializers refer to the file that those of `saved` lie in."""
    for name, value in model.graph.initializers.items():
        other = saved.graph.initializers.get(name)
        if other is not None and isinstance(other.const_value, ir.ExternalTensor):
            value.const_value = other.const_value
