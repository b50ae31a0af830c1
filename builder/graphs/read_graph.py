"""An ONNX file by any exporter, or a component traced here, made ready for its LoRA inputs."""

import hashlib
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_ir.passes.common import InlinePass, LiftConstantsToInitializersPass, ShapeInferencePass

from trt_lora.builder.graphs.component_folder import describe_component
from trt_lora.builder.passes.foreign.plain_gemms import PlainGemms
from trt_lora.plugins.contract.sites import parse_binding
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.manifest import BaseModel
from trt_lora.runtime.memory.dtypes import DTYPES

_LEAST_IR = 10  # functions of the graph's own, and codes of 4 bits


@dataclass(frozen=True)
class ReadGraph:
    """A graph, and the linears of its module that are not in it."""

    model: ir.Model
    no_effect: tuple[str, ...] = ()  # their paths: no output depends on them


def read_graph(path: Path, dtype: str, outputs: Collection[str] = ()) -> ReadGraph:
    """Return the graph of a file; its functions are inlined, and every size has a number or a name.

    Args:
        path: of the file, or of the folder of a component of a pipeline.
        dtype: of a component's weights.
        outputs: those that a component's graph returns; none: all.

    Raises:
        ModelError: it is no ONNX file, has LoRA inputs already, lacks its weights, or takes or
            returns what no engine does; or a component cannot be loaded or traced.
        BackendError: diffusers is not installed.
    """
    no_effect: tuple[str, ...] = ()
    if path.is_dir():  # torch is for these alone
        from trt_lora.builder.graphs.trace_component import trace_component

        exported = trace_component(path, dtype, outputs)
        model, no_effect = exported.model, exported.no_effect
    else:
        model = _load(path)
    if model.functions:
        InlinePass()(model)
    LiftConstantsToInitializersPass()(model)
    _infer_shapes(model)
    PlainGemms()(model)
    for value in (*model.graph.inputs, *model.graph.outputs):
        _check_value(path, value)
        _name_sizes(value)
    model.ir_version = max(model.ir_version, _LEAST_IR)
    return ReadGraph(model, no_effect)


def _load(path: Path) -> ir.Model:
    try:
        model = ir.load(path)
    except (OSError, DecodeError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as an ONNX file: {error}") from error
    _check_data(path, model)
    if inserted := [v.name for v in model.graph.inputs if parse_binding(str(v.name))]:
        raise ModelError(
            f"{path} has LoRA inputs already ({inserted[0]}): it is the graph of an engine; pass "
            "the file that was exported"
        )
    return model


def _check_data(path: Path, model: ir.Model) -> None:
    """Refuse a file whose weights are not beside it; they are read when they are saved."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).is_file():
            raise ModelError(
                f"{path} has weights in {tensor.path}, which is not there; copy it too"
            )


def _infer_shapes(model: ir.Model) -> None:
    """Infer what can be, in silence: it stops at other domains' operators and at false shapes."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        ShapeInferencePass()(model)
    finally:
        logger.setLevel(level)


def describe_graph(path: Path) -> BaseModel:
    """Return what the manifest says of a file; its fingerprint is of the file without its data."""
    if path.is_dir():
        return describe_component(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = f"{path.resolve().parent.name}/{path.stem}"
    return BaseModel(name, architecture="ONNX graph", fingerprint=digest)


def _check_value(path: Path, value: ir.Value) -> None:
    tensor, dtype = value.type, str(value.type)
    if isinstance(tensor, ir.TensorType) and tensor.dtype != ir.DataType.STRING:
        dtype = tensor.dtype.numpy().name
    if dtype not in DTYPES or value.shape is None:
        raise ModelError(
            f"{path}: {value.name} is {dtype} {value.shape}; an engine takes and returns tensors "
            f"of {', '.join(DTYPES)} with a known number of dimensions"
        )


def _name_sizes(value: ir.Value) -> None:
    """Give a dynamic size without a symbol that of its value and axis: x_0."""
    sizes = [
        f"{value.name}_{axis}" if isinstance(size, ir.SymbolicDim) and size.value is None else size
        for axis, size in enumerate(value.shape or ())
    ]
    value.shape = ir.Shape(sizes)
