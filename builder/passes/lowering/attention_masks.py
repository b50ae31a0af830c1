"""Classify an exported attention mask (causal, sliding window) by evaluating its subgraph.

The exporter writes masks that are added to scores: 0 where a key is seen, and a large negative
number elsewhere.
"""

import numpy as np
import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.lowering.evaluated import evaluated

FULL = 0  # a window without an end

_NEW = 3  # tokens of the trial


def boolean_mask(mask: ir.Value) -> ir.Value | None:
    """Return the boolean mask that an additive one was made from; None where it is another sum."""
    where = mask.producer()
    if where is None or where.op_type != "Where":
        return None
    seen, shown, hidden = where.inputs
    return seen if gv.number(shown) == 0 and (gv.number(hidden) or 0) < 0 else None


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
    mask = evaluated(model, seen, lengths, _NEW, max_len)
    if mask is None:
        return None
    found = np.broadcast_to(mask.astype(np.bool_), (len(lengths), 1, _NEW, max_len))
    queries = (lengths[:, None] + np.arange(_NEW))[:, None, :, None]
    behind = queries - np.arange(max_len)  # how far a key lies behind its token
    causal = behind >= 0
    window = int(behind[found & causal].max(initial=-1)) + 1
    if np.array_equal(found, causal):
        return FULL
    return window if np.array_equal(found, causal & (behind < window)) else None
