"""x in NVFP4: E2M1 in blocks of 16, each with a scale that it gets at run time.

A block's scale is E4M3 times one scale of all x, so that the block's largest value becomes 6, the
largest of E2M1. ONNX Runtime computes the function; TensorRT has an operator of its own:
https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes.coded_weight import FLOAT8_MAX, NVFP4_MAX

BLOCK = 16
E2M1 = ml_dtypes.float4_e2m1fn
_FUNCTION = ("trt_lora.nvfp4", "RoundToNVFP4", "")
_E4M3 = ir.DataType.FLOAT8E4M3FN


def rounding(model: ir.Model, x: ir.Value, unit: ir.Value) -> ir.Node:
    """Return a node, not yet in the graph, that rounds x [.., k]; the model gets its function.

    Args:
        model: that x is of.
        x: any floats.
        unit: [], the scale of all x.
    """
    domain, name, _ = _FUNCTION
    if _FUNCTION not in model.functions:
        model.functions[_FUNCTION] = _function(model.graph.opset_imports[""])
        model.graph.opset_imports[domain] = 1
    return ir.Node(domain, name, [x, unit])


def rounds(node: ir.Node) -> bool:
    """Whether a node is one of those."""
    return node.op_identifier() == _FUNCTION


def _function(opset: int) -> ir.Function:
    tape, inputs = Tape(), [ir.val("x"), ir.val("unit")]
    x, unit = (tape.op("Cast", [value], {"to": ir.DataType.FLOAT}) for value in inputs)
    sizes = [tape.op("Shape", [x], {"end": -1}), gv.constant(tape, [-1, BLOCK])]
    blocks = tape.op("Reshape", [x, tape.op("Concat", sizes, {"axis": 0})])
    step = _step(tape, blocks, unit)
    divisor = tape.op("Where", [tape.op("Equal", [step, _number(tape, 0)]), unit, step])
    codes = _rounded(tape, tape.op("Div", [blocks, divisor]))
    values = tape.op("Reshape", [tape.op("Mul", [codes, step]), tape.op("Shape", [x])])
    output = tape.op("CastLike", [values, inputs[0]])
    for number, node in enumerate(tape.nodes):
        node.name = node.outputs[0].name = f"{node.op_type}_{number}"
    domain, name, _ = _FUNCTION
    body = ir.Graph(inputs, [output], nodes=tape.nodes, opset_imports={"": opset}, name=name)
    return ir.Function(domain, name, graph=body, attributes=[])


def _step(tape: Tape, blocks: ir.Value, unit: ir.Value) -> ir.Value:
    """The scale of each block [.., 1]."""
    largest = tape.op("ReduceMax", [tape.op("Abs", [blocks]), gv.constant(tape, [-1])])
    wanted = tape.op("Div", [tape.op("Div", [largest, _number(tape, NVFP4_MAX)]), unit])
    held = tape.op("Min", [wanted, _number(tape, FLOAT8_MAX)])
    fine = tape.op("Cast", [held], {"to": _E4M3})
    return tape.op("Mul", [tape.op("Cast", [fine], {"to": ir.DataType.FLOAT}), unit])


def _rounded(tape: Tape, values: ir.Value) -> ir.Value:
    """The nearest E2M1, of two the even one; it has steps of 1/2 below 2, of 1 below 4, then of 2.

    ONNX Runtime's CPU has no E2M1.
    """
    size = tape.op("Min", [tape.op("Abs", [values]), _number(tape, NVFP4_MAX)])
    spacing = _number(tape, 2)
    for below, step in ((4, 1), (2, 0.5)):
        is_below = tape.op("Less", [size, _number(tape, below)])
        spacing = tape.op("Where", [is_below, _number(tape, step), spacing])
    steps = tape.op("Round", [tape.op("Div", [size, spacing])])
    return tape.op("Mul", [tape.op("Mul", [steps, spacing]), tape.op("Sign", [values])])


def _number(tape: Tape, value: float) -> ir.Value:
    return gv.constant(tape, np.float32(value))


def round_by_tensorrt(model: ir.Model) -> None:
    """Put TensorRT's operators in the place of the function."""
    found = [node for node in model.graph if rounds(node)]
    for node in found:
        *nodes, last = _operators(*map(gv.present, node.inputs))
        gv.replace_node(node, [*nodes, last], last.outputs[0])
    if found:
        model.graph.opset_imports["trt"] = 1
        del model.functions[_FUNCTION]


def _operators(x: ir.Value, unit: ir.Value) -> Iterator[ir.Node]:
    """What gives codes and E4M3 scales of blocks, and what makes x of them again."""
    blocks = {"axis": -1, "block_size": BLOCK}
    attributes = ir.convenience.convert_attributes({**blocks, "scale_type": _E4M3.value})
    codes = ir.Node("trt", "TRT_FP4DynamicQuantize", [x, unit], attributes, num_outputs=2)
    scales = ir.node("DequantizeLinear", [codes.outputs[1], unit])
    yield from (codes, scales)
    yield ir.node("DequantizeLinear", [codes.outputs[0], scales.outputs[0]], blocks)
