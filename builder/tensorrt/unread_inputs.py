"""Inputs of a network that its outputs do not depend on.

A parser may drop an operand without a word, as that of TensorRT-RTX 1.7.1 does with the
`nonpad_kv_seqlen` of `Attention`: such a plan would answer wrongly.
"""

from collections.abc import Iterator
from typing import Any

from trt_lora.builder.tensorrt.onnx_bytes import parsed_onnx


def unread_inputs(network: Any, model: bytes) -> list[str]:
    """Return the names of inputs that nodes of the ONNX model read, and no layer behind an output.

    An operand that is dropped goes unseen where another layer reads the same input.

    Args:
        network: parsed from `model`.
        model: an ONNX model.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {output.name: layer for layer in layers for output in _outputs(layer)}
    read = set[str]()
    waiting = [network.get_output(index).name for index in range(network.num_outputs)]
    while waiting:
        name = waiting.pop()
        if name not in read:
            read.add(name)
            waiting += [tensor.name for tensor in _inputs(makers.get(name))]
    inputs = (value for value in parsed_onnx(model).graph.inputs if value.uses())
    return [str(value.name) for value in inputs if value.name not in read]


def _inputs(layer: Any) -> Iterator[Any]:
    """The tensors that a layer reads; none for the maker of a network input."""
    tensors = (layer.get_input(index) for index in range(layer.num_inputs)) if layer else ()
    return (tensor for tensor in tensors if tensor is not None)  # an optional one may be missing


def _outputs(layer: Any) -> Iterator[Any]:
    return (layer.get_output(index) for index in range(layer.num_outputs))
