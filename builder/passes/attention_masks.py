"""What an exported attention mask lets a token see, told from the mask's own graph.

The exporter writes masks that are added to scores: 0 where a key is seen, and a large negative
number elsewhere.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from trt_lora.runtime.generation.static_inputs import BOUND, LENGTHS, STATIC_SHAPES
from trt_lora.runtime.generation.step_inputs import INPUT_IDS

FULL = 0  # a window without an end

_NEW = 3  # tokens of the trial


def boolean_mask(mask: ir.Value) -> ir.Value | None:
    """Return the boolean mask that an additive one was made from; None where it is another sum."""
    where = mask.producer()
    if where is None or where.op_type != "Where":
        return None
    seen, shown, hidden = where.inputs
    return seen if _constant(shown) == 0 and (_constant(hidden) or 0) < 0 else None


def attention_window(model: ir.Model, seen: ir.Value, max_len: int) -> int | None:
    """Return how many keys a token sees, itself included: `FULL`, or a sliding window.

    The mask is computed for rows of several lengths and compared, position by position.

    Args:
        model: whose graph computes the mask.
        seen: the boolean mask [batch, 1, sequence, bound].
        max_len: positions of the cache.

    Returns:
        None where the mask is no causal one, with a window or without.
    """
    lengths = np.unique([0, max_len // 2, max(max_len - _NEW, 0)]).astype(np.int64)
    found = _evaluate(model, seen, lengths, max_len)
    if found is None:
        return None
    queries = (lengths[:, None] + np.arange(_NEW))[:, None, :, None]
    behind = queries - np.arange(max_len)  # how far a key lies behind its token
    causal = behind >= 0
    window = int(behind[found & causal].max(initial=-1)) + 1
    if np.array_equal(found, causal):
        return FULL
    return window if np.array_equal(found, causal & (behind < window)) else None


def _evaluate(
    model: ir.Model, seen: ir.Value, lengths: npt.NDArray[np.int64], bound: int
) -> npt.NDArray[np.bool_] | None:
    """The mask [rows, 1, _NEW, bound]; None where more than lengths and shapes decides it."""
    given = {
        INPUT_IDS: np.zeros((len(lengths), _NEW), np.int64),
        LENGTHS: lengths,
        BOUND: np.zeros(bound, np.bool_),
    }
    needed = [value for value in _graph_inputs(seen) if value.name in STATIC_SHAPES]
    if any(value.name not in given for value in _graph_inputs(seen)):
        return None
    part = ir.Model(ir.convenience.extract(model.graph, needed, [seen]), ir_version=10)
    evaluator = ReferenceEvaluator(ir.to_proto(part))
    feeds = {str(value.name): given[str(value.name)] for value in needed}
    shape = (len(lengths), 1, _NEW, bound)
    (mask,) = evaluator.run(None, feeds)
    return np.broadcast_to(np.asarray(mask, np.bool_), shape)


def _graph_inputs(value: ir.Value) -> list[ir.Value]:
    """The graph inputs that a value is computed from, each once."""
    return list(dict.fromkeys(_inputs_behind(value, set())))


def _inputs_behind(value: ir.Value, visited: set[ir.Value]) -> Iterator[ir.Value]:
    if value in visited:
        return
    visited.add(value)
    if value.is_graph_input():
        yield value
    producer = value.producer()
    for operand in producer.inputs if producer is not None else ():
        if operand is not None:
            yield from _inputs_behind(operand, visited)


def _constant(value: ir.Value | None) -> float | None:
    """The number that a value holds; None where it is not one number."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size == 1 else None
