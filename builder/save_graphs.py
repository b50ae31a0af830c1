"""Save the files of an engine: ONNX, the standard one and ONNX Runtime's own, and the manifest."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.experts.adapted import AdaptExperts
from trt_lora.builder.passes.experts.lowered import FuseExperts, InterleaveExperts, StandardExperts
from trt_lora.builder.passes.lowering.disable_attention_tiling import DisableAttentionTiling
from trt_lora.builder.passes.lowering.flatten_batch import FlattenBatch
from trt_lora.builder.passes.lowering.fuse_add_into_gemm import FuseAddIntoGemm
from trt_lora.builder.passes.lowering.gather_logit_tokens import GatherLogitTokens
from trt_lora.builder.passes.lowering.grouped_query_attention import GroupQueryAttention
from trt_lora.builder.passes.lowering.multiply_codes import ROWS, MultiplyCodes
from trt_lora.builder.passes.lowering.optional_lora import OptionalLoRA
from trt_lora.builder.passes.lowering.standard_attention import StandardAttention
from trt_lora.plugins.contract.step import CACHE, CROSS, NEW_CACHE, NEW_CROSS
from trt_lora.runtime.files.file_record import file_record
from trt_lora.runtime.manifest import (
    ENCODER_FILES,
    MANIFEST_FILE,
    ONNX_CPU_FILE,
    ONNX_FILE,
    ONNX_WEIGHTS_FILE,
    STEP_FILES,
    Binding,
    Manifest,
)


@dataclass(frozen=True)
class Bindings:
    """What a graph takes and returns."""

    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]


def bindings_of(values: ir.Graph) -> Bindings:
    """Return what a saved graph takes and returns; it lets go of its weights."""
    for value in values.initializers.values():
        value.const_value = None  # onnxscript's rules keep the last graph that they rewrote
    return Bindings(tuple(map(_binding, values.inputs)), tuple(map(_binding, values.outputs)))


def _binding(value: ir.Value) -> Binding:
    sizes, dtype = gv.present(value.shape), gv.present(value.dtype)
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in sizes)
    name = str(value.name)
    places = {NEW_CACHE: CACHE, NEW_CROSS: CROSS}
    found = (old + name.removeprefix(new) for new, old in places.items() if name.startswith(new))
    return Binding(name, dtype.numpy().name, shape, next(found, ""))


def save_graphs(model: ir.Model, work: Path, level: str, tokens: int) -> None:
    """Write the files of an exported graph into the directory `work`.

    `ONNX_CPU_FILE` is written where ONNX Runtime has an operator for the graph's attention,
    experts or codes; it names the weights of `ONNX_FILE`.

    Args:
        model: with LoRA inputs; its attention is lowered in place.
        work: an engine directory in the making.
        level: of products by codes, one of `multiply_codes.LEVELS`.
        tokens: of a step, most.
    """
    own = model.clone()
    is_adapted = AdaptExperts(tokens, in_loops=True)(own).modified
    AdaptExperts(tokens)(model)
    InterleaveExperts()(model)
    InterleaveExperts()(own)
    has_own = is_adapted | GroupQueryAttention()(own).modified | FuseExperts()(own).modified
    StandardAttention()(model)
    StandardExperts(tokens)(model)
    ir.save(model, work / ONNX_FILE, external_data=ONNX_WEIGHTS_FILE)
    if has_own or any(node.op_type == "DequantizeLinear" for node in own.graph):
        StandardAttention()(own)  # of layers that the operator cannot express
        StandardExperts(tokens)(own)
        DisableAttentionTiling()(own)
        OptionalLoRA()(own)
        _lower_products(own, level)
        _share_weights(own, ir.load(work / ONNX_FILE))
        ir.save(own, work / ONNX_CPU_FILE)


def save_encoder_decoder(encoder: ir.Model, step: ir.Model, work: Path) -> None:
    """Write the two graphs of an encoder-decoder into the directory `work`.

    Both are of standard operators alone: ONNX Runtime's own attention knows no cross cache.
    """
    for model, files in ((encoder, ENCODER_FILES), (step, STEP_FILES)):
        StandardAttention()(model)
        ir.save(model, work / files.onnx, external_data=files.weights)


def _lower_products(model: ir.Model, level: str) -> None:
    is_flat = FlattenBatch()(model).modified
    if is_flat:
        GatherLogitTokens()(model)
    MultiplyCodes(level)(model)
    if is_flat:
        FuseAddIntoGemm()(model)


def _share_weights(model: ir.Model, saved: ir.Model) -> None:
    """Let initializers refer to the file that those of `saved` lie in, where the bytes are equal.

    Codes keep the dtype and shape that they have in `model`.
    """
    for name, value in model.graph.initializers.items():
        other = saved.graph.initializers.get(name.removesuffix(ROWS))
        if other is None or not isinstance(there := other.const_value, ir.ExternalTensor):
            continue
        tensor = gv.present(value.const_value)
        if tensor.nbytes == there.nbytes:
            value.const_value = ir.ExternalTensor(
                there.location,
                there.offset,
                there.length,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
                base_dir=there.base_dir,
            )


def save_manifest(manifest: Manifest, tools: Mapping[str, str], work: Path) -> Manifest:
    """Write the manifest of the files in `work`, and return it.

    Args:
        manifest: without files.
        tools: versions of what has compiled a plan, beside those it names.
        work: the engine directory in the making.
    """
    files = {path.name: file_record(path) for path in sorted(work.iterdir())}
    manifest = replace(manifest, versions={**manifest.versions, **tools}, files=files)
    (work / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest
