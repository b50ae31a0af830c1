"""Linears of an exported graph, each with its module path in the base model."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes import nvfp4
from trt_lora.builder.passes.codes.coded_weight import decoding
from trt_lora.builder.passes.windows import Window
from trt_lora.builder.targets import not_linear
from trt_lora.plugins.contract.modules import EXPERT_PARAMETERS

# The attribute of the exporter's wrapper that holds the model: the first part of every module path
# in the metadata.
WRAPPER_ATTRIBUTE = "model_"

EXPERTS_DOMAIN = "trt_lora.experts"  # of a trace: of what experts compute, as one node
_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_SAME = ("Identity", "QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Linear:
    """One node `y [..., n] = x [..., k] @ W`, or why a matrix product is not one."""

    node: ir.Node
    path: str  # the module's path, or the node's name where the metadata gives none
    k: int = 0
    n: int = 0
    refusal: str = ""
    experts: int = 0  # E of a matrix of all experts, whose node has more than this product
    window: Window | None = None  # of a convolution, whose x and y have their channels first

    @property
    def is_embedding(self) -> bool:
        """Whether the node reads rows of W by their numbers, the second of its inputs."""
        return self.node.op_type == "Gather"

    @property
    def x(self) -> ir.Value:
        """The linear's input."""
        return gv.present(self.node.inputs[0])

    @property
    def y(self) -> ir.Value:
        """The linear's output."""
        return self.node.outputs[0]


def has_module_paths(model: ir.Model) -> bool:
    """Return whether the exporter's metadata is there; a pass that strips it must come after."""
    return any(_SCOPES in node.metadata_props for node in model.graph)


def traced_paths(model: ir.Model) -> set[str]:
    """Return the path of every module that a node of the main graph comes from."""
    return {module_path(node) for node in model.graph}


def find_linears(model: ir.Model) -> Iterator[Linear]:
    """Yield every MatMul and Gemm of the main graph, in order, as a linear or with a refusal."""
    for node in model.graph:
        if node.domain == "" and node.op_type in ("MatMul", "Gemm"):
            yield _read(node)


def find_experts(model: ir.Model) -> Iterator[Linear]:
    """Yield the two matrices of every node of experts, in order; y is what all of them make."""
    for node in model.graph:
        if node.domain == EXPERTS_DOMAIN:
            for place, name in enumerate(EXPERT_PARAMETERS, 3):
                weight = gv.present(node.inputs[place])
                experts, n, k = (gv.size_of(weight, axis) for axis in range(3))
                yield Linear(node, f"{module_path(node)}.{name}", k, n, experts=experts)


def find_embedding(model: ir.Model, path: str) -> Iterator[Linear]:
    """Yield every Gather of rows of the weight [k, n] of the module at `path`."""
    for node in model.graph:
        if node.domain == "" and node.op_type == "Gather" and module_path(node) == path:
            k, n = gv.present(_constant_shape(node.inputs[0]))
            yield Linear(node, path, k, n)


def _read(node: ir.Node) -> Linear:
    scopes, classes = _metadata(node, _SCOPES), _metadata(node, _CLASSES)
    path = module_path(node)
    weight = _constant_shape(node.inputs[1])
    if weight is None:
        return Linear(node, path, refusal="its second operand is not a constant weight")
    if len(weight) != 2:
        return Linear(node, path, refusal=f"its weight has {len(weight)} dimensions, not 2")
    if len(scopes) < 2 or len(classes) < 2:
        return Linear(node, path, refusal="the exporter recorded no module for it")
    if refusal := not_linear(classes[-2]):
        return Linear(node, path, refusal=refusal)
    if node.attributes.get_int("transA", 0):
        return Linear(node, path, refusal="its input is transposed")
    k, n = reversed(weight) if node.attributes.get_int("transB", 0) else weight
    return Linear(node, path, k, n)


def module_path(node: ir.Node) -> str:
    """Return the path of the module that a node comes from, or else the node's name."""
    has_scope = len(_metadata(node, _SCOPES)) > 1
    return recorded_path(node) if has_scope else str(node.name)


def recorded_path(node: ir.Node) -> str:
    """Return the path of a node's module by the metadata alone; empty where it says none."""
    scopes = _metadata(node, _SCOPES)
    return scopes[-2].removeprefix(f"{WRAPPER_ATTRIBUTE}.") if len(scopes) > 1 else ""


def recorded_refusal(node: ir.Node) -> str:
    """Return why a node's module is no linear by the metadata; empty if it is, or is not there."""
    classes = _metadata(node, _CLASSES)
    return not_linear(classes[-2]) if len(classes) > 1 else ""


def _metadata(node: ir.Node, key: str) -> list[str]:
    """The exporter writes these lists with `repr`, outermost scope first, the operator last."""
    return [str(item) for item in ast.literal_eval(node.metadata_props.get(key, "[]"))]


def _constant_shape(value: ir.Value | None) -> Sequence[int] | None:
    """Shape of a constant, seen through codes and the Transpose of a weight with other readers."""
    if value is None:
        return None
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose":
        shape = _constant_shape(producer.inputs[0]) or ()
        axes = producer.attributes.get_ints("perm", range(len(shape))[::-1])
        return tuple(shape[axis] for axis in axes) if shape else None
    if (decoder := decoding(value)) is not None:
        return _constant_shape(decoder.inputs[0])
    return None if value.const_value is None else tuple(value.const_value.shape.numpy())


def source_of(value: ir.Value) -> ir.Value:
    """Return what a value is, behind nodes that leave it as it is or round it to codes and back."""
    node = value.producer()
    while node is not None and (node.op_type in _SAME or nvfp4.rounds(node)) and node.inputs[0]:
        value = node.inputs[0]
        node = value.producer()
    return value
