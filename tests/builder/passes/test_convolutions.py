"""LoRA on convolutions, against torch's own convolution with A and then B."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_ir.passes.common import ShapeInferencePass
from torch import Tensor
from torch.nn import functional

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.insert_lora import InsertLoRA, InsertLoRAResult
from trt_lora.builder.passes.linears import Linear
from trt_lora.builder.passes.windows import Window, refusal
from trt_lora.builder.targets import Targets
from trt_lora.plugins.contract.operators import DOMAIN

RANK = 2


def graph(*convolutions: str, sizes: str = "h, w") -> ir.Model:
    """Every line is `name = Conv <...> (input)`, still without its weight."""
    last = convolutions[-1].partition(" ")[0]
    of_output = ", ".join(f"o{size}" for size in sizes.split(", "))
    return ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[b, 3, {sizes}] x) => (float[b, n, {of_output}] {last})
        {{ {" ".join(convolutions)} }}
    """)


def with_weights(model: ir.Model, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Give each convolution its weight, in order, and return them by the outputs' names."""
    generator, weights = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for node in model.graph:
        if node.op_type == "Conv":
            name = str(node.outputs[0].name)
            weights[name] = torch.randn(shapes[name], generator=generator)
            node.resize_inputs(2)
            tensor = ir.tensor(weights[name].numpy())
            node.replace_input_with(1, gv.initializer(model.graph, f"w_{name}", tensor))
    ShapeInferencePass()(model)
    return weights


def insert(model: ir.Model, *, vectors: bool = False) -> InsertLoRAResult:
    """Insert LoRA at every convolution, each a module of its output's name."""
    linears = []
    for node in model.graph:
        if node.op_type == "Conv":
            assert node.inputs[1] is not None
            assert node.inputs[1].const_value is not None
            n, channels, *kernel = node.inputs[1].const_value.shape.numpy()
            window = Window.of(node, tuple(kernel))
            path = str(node.outputs[0].name)
            linears.append(
                Linear(node, path, channels * window.taps, n, refusal(node), window=window)
            )
    targets = Targets.from_names(["all-linear"])
    result = InsertLoRA(targets, linears=linears, vectors=vectors, is_part=True)(model)
    assert isinstance(result, InsertLoRAResult)
    return result


def adapters(weights: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A [r, c, *kernel] and B [n, r, 1, ...] of every convolution."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: (
            torch.randn(RANK, *weight.shape[1:], generator=generator),
            torch.randn(len(weight), RANK, *(1,) * (weight.dim() - 2), generator=generator),
        )
        for name, weight in weights.items()
    }


def run(model: ir.Model, x: Tensor, pairs: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """The output of ONNX Runtime with A and B as they lie in a file, as matrices."""
    feed = {"x": x.numpy()}
    for name, (a, b) in pairs.items():
        feed[f"lora_A_{name}"] = a.reshape(RANK, -1).T.numpy()
        feed[f"lora_B_{name}"] = b.reshape(len(b), RANK).T.numpy()
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    feed = {name: np.ascontiguousarray(value) for name, value in feed.items()}
    return torch.from_numpy(np.asarray(session.run(None, feed)[0]))


@pytest.mark.parametrize("size", [(8, 8), (9, 12), (13, 7)])
@pytest.mark.parametrize(
    ("attributes", "kernel", "options"),
    [
        ("", (1, 1), {}),
        ("<strides = [2, 2]>", (1, 1), {"stride": 2}),
        ("<pads = [1, 1, 1, 1]>", (1, 1), {"padding": 1}),
        ("<pads = [1, 1, 1, 1]>", (3, 3), {"padding": 1}),
        ("<pads = [1, 1, 1, 1], strides = [2, 2]>", (3, 3), {"padding": 1, "stride": 2}),
        ("<strides = [3, 2]>", (2, 4), {"stride": (3, 2)}),
        (
            "<pads = [2, 4, 2, 4], dilations = [2, 3], strides = [1, 2]>",
            (3, 3),
            {"padding": (2, 4), "dilation": (2, 3), "stride": (1, 2)},
        ),
    ],
)
def test_a_delta_is_a_convolution_with_a_and_then_with_b(
    attributes: str, kernel: tuple[int, int], options: dict[str, Any], size: tuple[int, int]
) -> None:
    model = graph(f"y = Conv {attributes} (x)")
    weights = with_weights(model, y=(4, 3, *kernel))
    (site,) = insert(model).sites
    assert (site.path, site.k, site.n) == ("y", 3 * kernel[0] * kernel[1], 4)
    pairs, x = adapters(weights), torch.randn(2, 3, *size)
    (a, b), base = pairs["y"], functional.conv2d(x, weights["y"], **options)
    expected = base + functional.conv2d(functional.conv2d(x, a, **options), b)
    torch.testing.assert_close(run(model, x, pairs), expected, rtol=1e-5, atol=1e-5)
    zero = {"y": (a, torch.zeros_like(b))}
    torch.testing.assert_close(run(model, x, zero), base, rtol=1e-5, atol=1e-5)


def test_a_padding_may_be_another_behind_than_in_front() -> None:
    model = graph("y = Conv <pads = [0, 1, 2, 3]> (x)")
    weights = with_weights(model, y=(4, 3, 3, 3))
    insert(model)
    pairs, x = adapters(weights), torch.randn(1, 3, 8, 9)
    (a, b), wide = pairs["y"], functional.pad(x, (1, 3, 0, 2))
    delta = functional.conv2d(functional.conv2d(wide, a), b)
    expected = functional.conv2d(wide, weights["y"]) + delta
    torch.testing.assert_close(run(model, x, pairs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "kernel", "conv"),
    [("t", (3,), functional.conv1d), ("t, h, w", (3, 1, 2), functional.conv3d)],
)
def test_signals_and_videos_have_other_numbers_of_sizes(
    sizes: str, kernel: tuple[int, ...], conv: Callable[..., Tensor]
) -> None:
    model = graph("y = Conv (x)", sizes=sizes)
    weights = with_weights(model, y=(4, 3, *kernel))
    insert(model)
    pairs, x = adapters(weights), torch.randn(2, 3, *(5, 6, 7)[: len(kernel)])
    a, b = pairs["y"]
    expected = conv(x, weights["y"]) + conv(conv(x, a), b)
    torch.testing.assert_close(run(model, x, pairs), expected, rtol=1e-5, atol=1e-5)


def test_convolutions_of_one_window_share_a_node_and_others_do_not() -> None:
    model = graph(
        "p = Conv <pads = [1, 1, 1, 1]> (x)",
        "q = Conv <pads = [1, 1, 1, 1]> (x)",
        "r = Conv (x)",
        "s = Sum(p, q, r)",
    )
    weights = with_weights(model, p=(4, 3, 3, 3), q=(4, 3, 3, 3), r=(4, 3, 1, 1))
    insert(model)
    operators = sorted(node.op_type for node in model.graph if node.domain == DOMAIN)
    assert operators == ["LoraDelta1", "LoraDelta2"]
    pairs, x, expected = adapters(weights), torch.randn(1, 3, 6, 6), torch.zeros(())
    for name, (a, b) in pairs.items():
        pad = a.shape[-1] // 2
        delta = functional.conv2d(functional.conv2d(x, a, padding=pad), b)
        expected = expected + functional.conv2d(x, weights[name], padding=pad) + delta
    torch.testing.assert_close(run(model, x, pairs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [("<group = 3>", "3 groups"), ('<auto_pad = "SAME_UPPER">', "auto_pad SAME_UPPER")],
)
def test_what_is_no_matrix_is_left_alone_with_the_reason(attributes: str, reason: str) -> None:
    model = graph(f"y = Conv {attributes} (x)", "z = Conv (y)")
    with_weights(model, y=(3, 1 if "group" in attributes else 3, 3, 3), z=(4, 3, 1, 1))
    result = insert(model)
    assert [site.path for site in result.sites] == ["z"]
    (left,) = result.left_alone
    assert left.path == "y"
    assert reason in left.reason


def test_vectors_leave_convolutions_alone() -> None:
    model = graph("y = Conv (x)")
    with_weights(model, y=(4, 3, 1, 1))
    result = insert(model, vectors=True)
    assert not result.sites
    assert "vectors" in result.left_alone[0].reason
