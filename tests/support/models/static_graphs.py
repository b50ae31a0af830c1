"""One layer of attention over a static cache, written by hand as the exporter leaves it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes.common import ShapeInferencePass

from trt_lora.runtime.generation.decoding.step_inputs import token_inputs

Array = npt.NDArray[Any]

HEADS, KV_HEADS, SIZE, MAX_LEN = 4, 2, 16, 16

_PLACES = """
  new = Squeeze(new_shape)
  steps = Range(zero, new, one)
  starts = Unsqueeze(lengths, axis_1)
  places = Add(starts, steps)
  rows = Unsqueeze(places, axes_1_3)
  bound_shape = Shape(bound)
  last = Squeeze(bound_shape)
  keys = Range(zero, last, one)
"""
CAUSAL = "seen = LessOrEqual(keys, rows)"
_WINDOW = """
  causal = LessOrEqual(keys, rows)
  edge = Sub(rows, window)
  near = Greater(keys, edge)
  seen = And(causal, near)
"""
BOTH_WAYS = "seen = Less(keys, last)"
_ROTATION = """
  {x}_first = Slice({x}, axis_0, half, axis_3, axis_1)
  {x}_second = Slice({x}, half, end, axis_3, axis_1)
  {x}_minus = Neg({x}_second)
  {x}_across = Concat<axis = -1>({x}_minus, {x}_first)
  {x}_cos = Mul({x}, cos)
  {x}_sin = Mul({x}_across, sin)
  {x}_turned = Add({x}_cos, {x}_sin)
"""
_TABLES = """
  column = Unsqueeze(places, axis_2)
  number = Cast<to = 1>(column)
  angle = Mul(number, inverse)
  {both}
  cos_3d = Cos(angles)
  sin_3d = Sin(angles)
  cos = Unsqueeze(cos_3d, axis_1)
  sin = Unsqueeze(sin_3d, axis_1)
"""
EQUAL_HALVES = "angles = Concat<axis = -1>(angle, angle)"


@dataclass(frozen=True)
class Layer:
    """What a layer is made of."""

    mask: str = CAUSAL
    window: int = 0
    softcap: float = 0.0
    size: int = SIZE  # of a head
    value_size: int = SIZE
    turns: bool = False  # queries and keys, by a rotary embedding
    angles: str = EQUAL_HALVES

    def model(self) -> ir.Model:
        """The graph, of opset 24, in float32."""
        turned = "_turned" if self.turns else ""
        rotation = _TABLES.format(both=self.angles) if self.turns else ""
        for x in ("q", "k") if self.turns else ():
            rotation += _ROTATION.format(x=x)
        cache = f"float[batch, {KV_HEADS}, {MAX_LEN}"
        text = f"""
<ir_version: 10, opset_import: ["" : 24]>
g (int64[batch, s] input_ids, int64[batch] lengths, bool[bound] bound,
   float[batch, {HEADS}, s, {self.size}] q, float[batch, {KV_HEADS}, s, {self.size}] k,
   float[batch, {KV_HEADS}, s, {self.value_size}] v, {cache}, {self.size}] cache_k,
   {cache}, {self.value_size}] cache_v)
  => (float[batch, s, {HEADS * self.value_size}] y, {cache}, {self.size}] new_k,
      {cache}, {self.value_size}] new_v) {{
  new_shape = Shape<start = 1, end = 2>(input_ids)
  {_PLACES} {rotation} {_WINDOW if self.window else self.mask}
  mask = Where(seen, shown, hidden)
  new_k = TensorScatter<axis = -2, mode = "linear">(cache_k, k{turned}, lengths)
  new_v = TensorScatter<axis = -2, mode = "linear">(cache_v, v, lengths)
  ks = Slice(new_k, axis_0, bound_shape, axis_2, axis_1)
  vs = Slice(new_v, axis_0, bound_shape, axis_2, axis_1)
  attended = Attention<scale = 0.25, softcap = {self.softcap:.1f}>(q{turned}, ks, vs, mask)
  by_token = Transpose<perm = [0, 2, 1, 3]>(attended)
  y = Reshape(by_token, flat)
}}"""
        model = with_constants(
            ir.from_onnx_text(text), {"window": np.array(self.window)}, self.size
        )
        for value, size in (("ks", self.size), ("vs", self.value_size)):
            named(model, value).shape = ir.Shape(["batch", KV_HEADS, None, size])
        return model


LAYERS = {
    "causal": Layer(),
    "window": Layer(window=3),
    "soft cap": Layer(softcap=2.0),
    "turned": Layer(turns=True),
    "turned, with a window": Layer(turns=True, window=5),
}
# Rows of different lengths decode together; a prompt of one row goes in chunks; new rows prefill.
STEPS = {"decode": ([3, 9, 0, 14], 1), "chunk": ([6], 5), "prefill": ([0, 0, 0], 7)}


def named(model: ir.Model, name: str) -> ir.Value:
    """The output of a node, by its name."""
    return next(v for node in model.graph for v in node.outputs if v.name == name)


def with_constants(model: ir.Model, more: dict[str, Array], size: int = SIZE) -> ir.Model:
    """Give the values that nothing computes what their names say; infer all shapes."""
    numbers: dict[str, Array] = {
        **{f"axis_{n}": np.array([n]) for n in range(4)},
        "zero": np.array(0),
        "one": np.array(1),
        "axes_1_3": np.array([1, 3]),
        "half": np.array([size // 2]),
        "end": np.array([2**63 - 1]),
        "last_axis": np.array([-1]),
        "flat": np.array([0, 0, -1]),
        "shown": np.array(0, np.float32),
        "hidden": np.array(-1e30, np.float32),
        "inverse": (10000.0 ** (-np.arange(size // 2) * 2 / size)).astype(np.float32),
        **more,
    }
    read = {v for node in model.graph for v in node.inputs if v is not None}
    for value in read:
        if value.producer() is None and not value.is_graph_input():
            value.const_value = ir.tensor(numbers[str(value.name)], name=value.name)
            model.graph.register_initializer(value)
    for value in model.graph.inputs:
        value.name = {"cache_k": "cache.0.key", "cache_v": "cache.0.value"}.get(
            str(value.name), value.name
        )
    ShapeInferencePass()(model)
    return model


def run(model: ir.Model, feeds: dict[str, Array]) -> list[Array]:
    """The outputs of a graph on ONNX Runtime, of the feeds that it has inputs for."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of a cache that is not written in place
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    names = [each.name for each in session.get_inputs()]
    return [np.asarray(each) for each in session.run(None, {name: feeds[name] for name in names})]


def step(layer: Layer, lengths: list[int], new: int) -> dict[str, Array]:
    """The inputs of a step of rows of these lengths, every place of the cache filled."""
    rng = np.random.default_rng(len(lengths))
    rows, bound = len(lengths), max(lengths) + new
    ids, filled = np.zeros((rows, new), np.int64), np.array(lengths)
    shapes = {
        "q": (rows, HEADS, new, layer.size),
        "k": (rows, KV_HEADS, new, layer.size),
        "v": (rows, KV_HEADS, new, layer.value_size),
        "cache.0.key": (rows, KV_HEADS, MAX_LEN, layer.size),
        "cache.0.value": (rows, KV_HEADS, MAX_LEN, layer.value_size),
    }
    random = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return {**token_inputs(ids, filled, np.zeros(0, np.int64), bound), **random}
