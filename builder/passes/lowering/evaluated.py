"""Evaluate position-only subgraphs: masks and rotary tables."""

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from trt_lora.runtime.generation.decoding.step_inputs import BOUND, INPUT_IDS, LENGTHS, TOKEN_SHAPES
from trt_lora.runtime.memory.dtypes import Array


def evaluated(
    model: ir.Model, value: ir.Value, lengths: npt.NDArray[np.int64], new: int, bound: int
) -> Array | None:
    """Compute a value of a graph whose cache is static; None where more than places decides it.

    Args:
        model: whose graph computes the value.
        value: one of its values.
        lengths: tokens already in each row [rows].
        new: tokens of each row in the step.
        bound: positions of the cache looked at.
    """
    given: dict[str, Array] = {
        INPUT_IDS: np.zeros((len(lengths), new), np.int64),
        LENGTHS: np.asarray(lengths, np.int64),
        BOUND: np.zeros(bound, np.bool_),
    }
    needed = [each for each in _graph_inputs(value) if each.name in TOKEN_SHAPES]
    if any(each.name not in given for each in _graph_inputs(value)):
        return None
    part = ir.Model(ir.convenience.extract(model.graph, needed, [value]), ir_version=10)
    evaluator = ReferenceEvaluator(ir.to_proto(part))
    (found,) = evaluator.run(None, {str(each.name): given[str(each.name)] for each in needed})
    return np.asarray(found)


def _graph_inputs(value: ir.Value) -> list[ir.Value]:
    """The graph inputs that a value is computed from, each once."""
    behind, waiting = {value: None}, [value]
    while waiting:
        producer = waiting.pop().producer()
        operands = (operand for operand in (producer.inputs if producer else ()) if operand)
        new = dict.fromkeys(operand for operand in operands if operand not in behind)
        behind |= new
        waiting += new
    return [each for each in behind if each.is_graph_input()]
