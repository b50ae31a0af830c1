"""Save the ONNX files of an engine: the standard one, and ONNX Runtime's own over its weights."""

from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.passes.lowering.disable_attention_tiling import DisableAttentionTiling
from trt_lora.builder.passes.lowering.flatten_batch import FlattenBatch
from trt_lora.builder.passes.lowering.fuse_add_into_gemm import FuseAddIntoGemm
from trt_lora.builder.passes.lowering.gather_logit_tokens import GatherLogitTokens
from trt_lora.builder.passes.lowering.grouped_query_attention import GroupQueryAttention
from trt_lora.builder.passes.lowering.optional_lora import OptionalLoRA
from trt_lora.builder.passes.lowering.standard_attention import StandardAttention
from trt_lora.runtime.manifest import ONNX_CPU_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE


def save_graphs(model: ir.Model, work: Path) -> None:
    """Write the files of an exported graph into the directory `work`.

    `ONNX_CPU_FILE` is written where ONNX Runtime has an operator for the graph's attention; it
    names the weights of `ONNX_FILE`.

    Args:
        model: with LoRA inputs; its attention is lowered in place.
        work: an engine directory in the making.
    """
    own = model.clone()
    has_own = GroupQueryAttention()(own).modified
    StandardAttention()(model)
    ir.save(model, work / ONNX_FILE, external_data=ONNX_WEIGHTS_FILE)
    if has_own:
        StandardAttention()(own)  # of layers that the operator cannot express
        DisableAttentionTiling()(own)
        OptionalLoRA()(own)
        if FlattenBatch()(own).modified:
            GatherLogitTokens()(own)
            FuseAddIntoGemm()(own)
        _share_weights(own, ir.load(work / ONNX_FILE))
        ir.save(own, work / ONNX_CPU_FILE)


def _share_weights(model: ir.Model, saved: ir.Model) -> None:
    """Let initializers refer to the file that those of `saved` lie in."""
    for name, value in model.graph.initializers.items():
        other = saved.graph.initializers.get(name)
        if other is not None and isinstance(other.const_value, ir.ExternalTensor):
            value.const_value = other.const_value
