"""Graphs of one linear whose weight is codes, and random codes to put in them."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import RemoveUnusedNodesPass
from support.models.exporter_metadata import come_from

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.codes import nvfp4
from trt_lora.builder.passes.codes.coded_weight import E4M3, CodedWeight, multiplied, packed
from trt_lora.builder.passes.quantise_linears import QuantiseLinears
from trt_lora.runtime.memory.dtypes import Array

N, K, BLOCK = 6, 48, 16  # three blocks a row: an odd number of zeros
_ROWS, _READ = [5, 2, 2], ("DequantizeLinear", "Gather")


def random_codes(
    bits: int,
    dtype: str,
    *,
    is_symmetric: bool = False,
    is_ordered: bool = True,
    has_factors: bool = False,
) -> CodedWeight:
    """A weight [N, K] of random codes, scales and zeros, in the order of k or a random one."""
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, (N, K), dtype=np.uint8)
    zeros = random.integers(0, 1 << bits, (N, K // BLOCK), dtype=np.uint8)
    scales = random.normal(size=zeros.shape).astype(dtype)
    both = packed(codes) if bits == 4 else codes
    order = None if is_ordered else random.permutation(K)
    factors = random.uniform(0.5, 2, K).astype(dtype) if has_factors else None
    points = None if is_symmetric else zeros
    return CodedWeight(bits, BLOCK, both, scales, points, order, factors=factors)


def float_codes(dtype: str, *, is_ordered: bool = True) -> CodedWeight:
    """A weight [N, K] of random codes that are floats, with one scale a row."""
    random = np.random.default_rng(0)
    codes = random.choice(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), (N, K))  # NaN
    scales = np.abs(random.normal(size=(N, 1))).astype(dtype)
    order = None if is_ordered else random.permutation(K)
    return CodedWeight(8, K, codes, scales, order=order, is_float=True)


def nvfp4_codes(dtype: str) -> CodedWeight:
    """A weight [N, K] of random codes that are E2M1, in blocks of 16, for x that is rounded."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 16, (N, K), dtype=np.uint8).view(nvfp4.E2M1).astype(E4M3)
    fine = np.abs(random.normal(size=(N, K // nvfp4.BLOCK))).astype(E4M3)
    unit, x_scale = np.array(0.01, np.float32), np.array(0.002, dtype)
    return CodedWeight(
        8,
        nvfp4.BLOCK,
        codes.view(np.uint8),
        multiplied(fine, unit, dtype),
        is_float=True,
        x_scale=x_scale,
        parts=(fine, unit),
    )


def coded_graph(weight: CodedWeight, linear: str, path: str = "proj") -> ir.Model:
    """A graph in which `linear` makes y [t, N] of x [t, K], its weight w [K, N] or v [N, K]."""
    dtype = weight.scales.dtype
    kind = {"float32": "float", "float16": "float16"}[dtype.name]
    model = ir.from_onnx_text(
        f'<ir_version: 11, opset_import: ["" : 24]> g ({kind}[t, {K}] x, {kind}[{K}, {N}] w, '
        f"{kind}[{N}, {K}] v, {kind}[{N}] b) => ({kind}[t, {N}] y) {{ {linear} }}"
    )
    for value in list(model.graph.inputs)[1:]:
        model.graph.inputs.remove(value)
        value.const_value = ir.tensor(
            np.ones(gv.present(value.shape).numpy(), dtype), name=value.name
        )
        model.graph.register_initializer(value)
    for node in model.graph:
        come_from(node, "proj")
    QuantiseLinears({path: weight})(model)
    return model


def tied_graph(weight: CodedWeight) -> ir.Model:
    """A graph that multiplies by a weight and reads rows of it, as a head and its embedding do."""
    rows = f"i = Constant <value_ints = {_ROWS}> () e = Gather(v, i) u = Transpose(e)"
    model = coded_graph(weight, f"z = MatMul(x, w) {rows} y = Concat <axis = -1> (z, u)")
    made, gather = (next(n for n in model.graph if n.op_type == kind) for kind in _READ)
    gather.replace_input_with(0, made.outputs[0])
    RemoveUnusedNodesPass()(model)
    model.graph.outputs[0].shape = None
    return model


def tied_answer(weight: CodedWeight) -> Array:
    """Return y [K, N + 3] of that graph, of x that is the identity."""
    values = weight.dequantised()
    return np.concatenate([values.T, values[_ROWS].T], axis=-1)


def run(model: ir.Model, x: Array, folder: Path) -> Array:
    """Return y of x, by the graph's own nodes in ONNX Runtime, the weights in a file."""
    ir.save(model, folder / "m.onnx", external_data="m.data")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        folder / "m.onnx", options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, {"x": x})[0])
