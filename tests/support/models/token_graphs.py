"""Graphs of random weights in which every token is computed from its own values, and their runs."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import ShapeInferencePass

from trt_lora.builder.passes.lora_function import lora_function
from trt_lora.plugins.contract.operators import DOMAIN, operator_named

WIDTH, RANK = 4, 2
SHAPES = ((2, 3), (3, 1), (1, 1))  # batch, sequence
GROUP = """
  h = Gather(table, input_ids)
  n = LayerNormalization<axis = -1>(h, scale)
  d1, d2 = trt_lora.LoraDelta2(n, A1, B1, A2, B2)
  l1 = MatMul(n, w1)
  y1 = Add(l1, d1)
  l2 = MatMul(n, w2)
  y2 = Add(l2, d2)
"""
GATED = (
    GROUP
    + """
  s = Sigmoid(y1)
  b = Add(y2, bias)
  g = Mul(s, b)
  l3 = MatMul(g, w3)
  r = trt_lora.LoraAdd1(g, A3, B3, h)
  y = Add(r, l3)
"""
)
# Every token sees those of its row: the sizes of the batch count.
MIXED = (
    GROUP
    + """
  t = Transpose<perm = [0, 2, 1]>(y1)
  seen = MatMul(y2, t)
  g = MatMul(seen, y2)
  l3 = MatMul(g, w3)
  r = trt_lora.LoraAdd1(g, A3, B3, h)
  o = Add(r, l3)
  m1, m2 = trt_lora.LoraDelta2(o, A1, B1, A2, B2)
  s = Sigmoid(m1)
  p = Mul(s, m2)
  y = trt_lora.LoraAdd1(p, A3, B3, o)
"""
)
# The output head sees the tokens of some places alone, as the exporter writes it.
HEAD = """
  view = Reshape(y, whole)
  turned = Transpose<perm = [1, 0, 2]>(view)
  place = Unsqueeze(kept, last)
  found = GatherND(turned, place)
  index = Transpose<perm = [1, 0, 2]>(found)
  logits = MatMul(index, w4)
"""

Feeds = dict[str, npt.NDArray[Any]]


def graph(body: str, head: str = "logits = Identity(y)") -> ir.Model:
    """A model of random weights whose logits are y, or what a head makes of it."""
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=(WIDTH, WIDTH)) for name in ("w1", "w2", "w3", "w4")}
    weights |= {"table": random.normal(size=(9, WIDTH)), "scale": np.ones(WIDTH)}
    weights |= {"bias": random.normal(size=WIDTH), "plane": random.normal(size=(3, WIDTH))}
    views = {"two": [0, 0, 2, WIDTH // 2], "one": [0, 0, WIDTH]}
    views |= {"whole": [1, -1, WIDTH], "last": [-1]}
    constants = {name: array.astype(np.float32) for name, array in weights.items()}
    constants |= {name: np.array(sizes) for name, sizes in views.items()}
    factors = ", ".join(f"float[{WIDTH}, r{n}] A{n}, float[r{n}, {WIDTH}] B{n}" for n in (1, 2, 3))
    places = "int64[kept] kept, " if head == HEAD else ""
    model = ir.from_onnx_text(f"""
<ir_version: 10, opset_import: ["" : 24, "{DOMAIN}" : 1]>
g (int64[batch, sequence] input_ids, {places}{factors})
  => (float[a, b, {WIDTH}] logits) {{
  {body} {head}
}}""")
    for name in ("LoraDelta2", "LoraAdd1"):
        operator = operator_named(name)
        assert operator is not None
        function = lora_function(operator, 24)
        model.functions[function.identifier()] = function
    for value in {v for node in model.graph for v in node.inputs if v and v.name in constants}:
        value.const_value = ir.tensor(constants[str(value.name)], name=value.name)
        model.graph.register_initializer(value)
    inferred = ShapeInferencePass()(model).model
    for node in inferred.graph:
        for output in node.outputs if node.domain == DOMAIN else ():
            output.shape = ir.Shape(["batch", "sequence", WIDTH])
            output.type = ir.TensorType(ir.DataType.FLOAT)
    return ShapeInferencePass()(inferred).model


def feeds(batch: int, sequence: int) -> Feeds:
    random = np.random.default_rng(1)
    factors = {f"A{n}": random.normal(size=(WIDTH, RANK)) for n in (1, 2, 3)}
    factors |= {f"B{n}": random.normal(size=(RANK, WIDTH)) for n in (1, 2, 3)}
    floats: Feeds = {name: array.astype(np.float32) for name, array in factors.items()}
    return {"input_ids": random.integers(0, 9, (batch, sequence)), **floats}


def session(model: ir.Model, saved: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    if saved is not None:
        options.optimized_model_filepath = str(saved)
    proto = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def run(model: ir.Model, inputs: Feeds) -> npt.NDArray[np.float32]:
    running = session(model)
    taken = {value.name for value in running.get_inputs()}
    found = running.run(None, {name: array for name, array in inputs.items() if name in taken})[0]
    return np.asarray(found, np.float32)


def kinds(model: ir.Model, folder: Path) -> Counter[str]:
    """What ONNX Runtime makes of a graph."""
    session(model, folder / "optimized.onnx")
    return Counter(node.op_type for node in ir.load(folder / "optimized.onnx").graph)
