"""How many kernels LoRA adds, by TensorRT-RTX's own list; no GPU is needed.

The layer is Llama-3-8B's with its real sizes. Attention is left out: q goes to the output
projection, k and v are outputs. Few values are made, and repeated, to keep it quick.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import ShapeInferencePass
from support.models.exporter_metadata import come_from

from trt_lora.builder.passes.insert_lora import InsertLoRA
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.targets import Targets
from trt_lora.builder.tensorrt.build_log import Kernel, read_kernels
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.plugins.contract.operators import DOMAIN
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime.manifest import Range

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")

HIDDEN, KEYS, MLP, MAX_RANK, RANK = 4096, 1024, 14336, 256, 16
LINEARS = {
    "q": ("self_attn.q_proj", HIDDEN, HIDDEN),
    "k": ("self_attn.k_proj", HIDDEN, KEYS),
    "v": ("self_attn.v_proj", HIDDEN, KEYS),
    "o": ("self_attn.o_proj", HIDDEN, HIDDEN),
    "gate": ("mlp.gate_proj", HIDDEN, MLP),
    "up": ("mlp.up_proj", HIDDEN, MLP),
    "down": ("mlp.down_proj", MLP, HIDDEN),
}
LAYER = f"""
<ir_version: 10, opset_import: ["" : 18]>
layer (float16[m, {HIDDEN}] x, float16[{HIDDEN}] g1, float16[{HIDDEN}] g2)
    => (float16[m, {KEYS}] k, float16[m, {KEYS}] v, float16[m, {HIDDEN}] out) {{
  squares = Mul(x, x)
  mean = ReduceMean<keepdims = 1>(squares, axes)
  root = Sqrt(mean)
  normed = Div(x, root)
  x1 = Mul(normed, g1)
  q = MatMul(x1, W_q)
  k = MatMul(x1, W_k)
  v = MatMul(x1, W_v)
  o = MatMul(q, W_o)
  residual = Add(x, o)
  squares2 = Mul(residual, residual)
  mean2 = ReduceMean<keepdims = 1>(squares2, axes)
  root2 = Sqrt(mean2)
  normed2 = Div(residual, root2)
  x2 = Mul(normed2, g2)
  gate = MatMul(x2, W_gate)
  up = MatMul(x2, W_up)
  sigmoid = Sigmoid(gate)
  silu = Mul(gate, sigmoid)
  product = Mul(silu, up)
  down = MatMul(product, W_down)
  out = Add(residual, down)
}}
"""


@dataclass(frozen=True)
class Counts:
    """Compute kernels of the layer, and how many of them copy an A or B."""

    kernels: int
    copies: int


def layer() -> ir.Model:
    """The layer with constants for weights and gains, as the exporter would leave it."""
    model = ir.from_onnx_text(LAYER)
    graph = model.graph
    constants: dict[str, np.ndarray[Any, Any]] = {
        f"W_{name}": weight(k, n, name) for name, (_, k, n) in LINEARS.items()
    }
    constants |= {name: np.ones(HIDDEN, np.float16) for name in ("g1", "g2")}
    for value in [value for value in graph.inputs if value.name in constants]:
        graph.inputs.remove(value)
    constants["axes"] = np.array([-1], np.int64)
    values = {v.name: v for node in graph for v in node.inputs if v is not None}
    for name, array in constants.items():
        values[name].const_value = ir.tensor(array, name=name)
        graph.register_initializer(values[name])
    for node in graph:
        if node.op_type == "MatMul":
            come_from(node, f"model.layers.0.{LINEARS[str(node.outputs[0].name)][0]}")
    ShapeInferencePass()(model)
    return model


def weight(k: int, n: int, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
    """A matrix of one repeated row; another for every linear, or TensorRT would merge two."""
    row = np.random.default_rng(len(name) + ord(name[0])).standard_normal(n) / 64
    return np.broadcast_to(row.astype(np.float16), (k, n))


def kernels(model: ir.Model, lora_plugin: str) -> Counts:
    """Build the model for 1 to 64 rows and count."""
    profile = {str(value.name): shape_range(value) for value in model.graph.inputs}
    compiler = Compiler(TENSORRT_RTX, NoProgress(), lora_plugin)
    found = compiler.kernels(model, Path("layer.onnx"), {"decode": profile})
    return Counts(len(found), sum(kernel.is_pad_copy for kernel in found))


def shape_range(value: ir.Value) -> Range:
    rows, ranks = (1, 8, 64), (1, RANK, MAX_RANK)
    assert value.shape is not None
    sizes = [
        (size, size, size) if isinstance(size, int) else rows if size.value == "m" else ranks
        for size in value.shape
    ]
    low, opt, high = zip(*sizes, strict=True)
    return Range(low, opt, high)


def with_lora(rank: int | None = None) -> ir.Model:
    """The layer with LoRA on its seven linears, of dynamic rank or of one."""
    model = layer()
    InsertLoRA(Targets.from_names(["all-linear"]))(model)
    for value in model.graph.inputs:
        if rank is not None and value.name != "x" and value.shape is not None:
            sizes = [size if isinstance(size, int) else rank for size in value.shape]
            value.shape = ir.Shape(sizes)
    return model


@pytest.fixture(scope="module")
def plain() -> Counts:
    return kernels(layer(), "native")


@pytest.mark.slow
def test_the_plugin_adds_four_kernels_to_a_llama_layer_and_copies_no_weight(plain: Counts) -> None:
    counts = kernels(with_lora(), "plugin")
    assert plain.kernels == 9
    assert counts.kernels - plain.kernels <= 4
    assert counts.copies == plain.copies == 0


@pytest.mark.slow
def test_native_lora_adds_many_more_and_copies_every_weight(plain: Counts) -> None:
    dynamic = kernels(with_lora(), "native")
    fixed = kernels(with_lora(RANK), "native")
    assert dynamic.kernels - plain.kernels == 25
    assert dynamic.copies == 14
    assert fixed.kernels - plain.kernels == 11
    assert fixed.copies == 0


LOG = """\
Name: [ShapeHostToDeviceCopy 0], LayerType: ShapeHostToDevice, Inputs: [], StreamId: 0, Metadata:
Name: __mye12_0_myl1_0, LayerType: shape_call, Inputs: [], TacticName: , StreamId: 0, Metadata:
Name: node_1+node_2_myl1_2, LayerType: gemm, Inputs: [ { Name: a, b } ], StreamId: 0, Metadata:
Name: __myl_ReplConc_myl1_3, LayerType: kgen, Inputs: [], StreamId: 2, Metadata: [x]
Name: __mye9_myl1_4, LayerType: signal, Inputs: [], StreamId: 2, Metadata:
Name: node_1+node_2_myl3_2, LayerType: gemm, Inputs: [], StreamId: 1, Metadata:
Total Activation Memory: 12336128 bytes"""


def test_the_list_of_the_log_is_read_profile_by_profile() -> None:
    assert read_kernels(LOG.splitlines()) == [
        Kernel("node_1+node_2_myl1_2", "gemm", profile=0, stream=0),
        Kernel("__myl_ReplConc_myl1_3", "kgen", profile=0, stream=2),
        Kernel("node_1+node_2_myl3_2", "gemm", profile=1, stream=1),
    ]
    assert [kernel.is_pad_copy for kernel in read_kernels(LOG.splitlines())] == [False, True, False]
    assert read_kernels(["nothing of the kind"]) == []


def test_a_group_is_a_node_in_the_form_that_costs_least() -> None:
    nodes = [node for node in with_lora().graph if node.domain == DOMAIN]
    assert [node.op_type for node in nodes] == ["LoraAdd3", "LoraAdd1", "LoraDelta2", "LoraAdd1"]
