"""Convolutions as linears over patches: y = Conv(x, W) is P @ W', and so is an adapter's delta.

P [batch, *sizes, channels * taps] holds what each element of y reads of x [batch, channels, *sizes]
in the order of a row of W [n, channels, *kernel], so that a file's A [rank, channels, *kernel] is a
matrix [rank, k] as it lies. A kernel of one tap reads x itself. Every tap is one strided slice of
the padded x; a slice that ends as far before the end of x as its tap is before the last one is as
long as y, whatever the size of x.
"""

from itertools import product

import onnx_ir as ir
from onnx_ir.tape import Tape

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.windows import Window

_TO_THE_END = 2**31 - 1


def patches(tape: Tape, x: ir.Value, window: Window) -> ir.Value:
    """Return P of an input."""
    if any(window.pads):
        x = tape.op("Pad", [x, gv.constant(tape, _all_axes(window.pads))])
    spatial = len(window.kernel)
    taps = [_slice(tape, x, window, tap) for tap in product(*map(range, window.kernel))]
    if len(taps) == 1:
        return tape.op("Transpose", taps, {"perm": [0, *range(2, 2 + spatial), 1]})
    apart = [tape.op("Unsqueeze", [tap, gv.constant(tape, [2])]) for tap in taps]
    rows = tape.op("Concat", apart, {"axis": 2})  # [batch, channels, taps, *sizes]
    last = tape.op("Transpose", [rows], {"perm": [0, *range(3, 3 + spatial), 1, 2]})
    return tape.op("Reshape", [last, gv.constant(tape, [*(0,) * (1 + spatial), -1])])


def channels_first(tape: Tape, rows: ir.Value) -> ir.Value:
    """Return [batch, channels, *sizes] of rows [batch, *sizes, channels]."""
    last = len(gv.present(rows.shape)) - 1
    return tape.op("Transpose", [rows], {"perm": [0, last, *range(1, last)]})


def shape_of_rows(y: ir.Value) -> ir.Shape:
    """Return the shape of the rows that become y."""
    batch, channels, *sizes = gv.present(y.shape)
    return ir.Shape([batch, *sizes, channels])


def _all_axes(pads: tuple[int, ...]) -> list[int]:
    front, behind = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    return [0, 0, *front, 0, 0, *behind]


def _slice(tape: Tape, x: ir.Value, window: Window, tap: tuple[int, ...]) -> ir.Value:
    starts = [place * step for place, step in zip(tap, window.dilations, strict=True)]
    left = [
        (size - 1 - place) * step
        for size, place, step in zip(window.kernel, tap, window.dilations, strict=True)
    ]
    if not any(starts) and not any(left) and set(window.strides) == {1}:
        return x
    ends = [-behind if behind else _TO_THE_END for behind in left]
    axes = range(2, 2 + len(tap))
    places = (starts, ends, axes, window.strides)
    return tape.op("Slice", [x, *(gv.constant(tape, list(each)) for each in places)])
