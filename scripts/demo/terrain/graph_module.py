"""GraphModule: an ONNX graph as a torch module, so that PEFT trains adapters for it.

Each Gemm and Conv becomes the `Linear` or `Conv2d` that it was exported from, at the path that its
weight is named by; all other nodes are computed as the ONNX standard says, for the attributes that
the terrain model has (https://onnx.ai/onnx/operators/).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

Attributes = Mapping[str, Any]
Inputs = Sequence[Tensor]


class GraphModule(nn.Module):
    """The main graph of a model, which has no subgraphs and one output."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """Take the weights, in their dtype.

        Args:
            model: with its weights.

        Raises:
            NotImplementedError: a node has an operator that is not one of OPERATORS.
        """
        super().__init__()
        self._nodes, self._output = list(model.graph.node), model.graph.output[0].name
        if unknown := {n.op_type for n in self._nodes} - OPERATORS.keys() - MODULES.keys():
            raise NotImplementedError(f"operators {', '.join(sorted(unknown))}")
        self._attributes = [_attributes(node) for node in self._nodes]
        self._constants = {
            each.name: torch.from_numpy(numpy_helper.to_array(each).copy())
            for each in model.graph.initializer
        }
        self._paths = {
            index: self._own(node.input, MODULES[node.op_type], self._attributes[index])
            for index, node in enumerate(self._nodes)
            if node.op_type in MODULES
        }

    def forward(self, **inputs: Tensor) -> Tensor:
        """Compute the output of inputs by their names."""
        values = {**self._constants, **inputs}
        for index, (node, attributes) in enumerate(zip(self._nodes, self._attributes, strict=True)):
            given = [values[name] for name in node.input if name]
            if (path := self._paths.get(index)) is not None:
                found = self.get_submodule(path)(given[0])
            else:
                found = OPERATORS[node.op_type](given, attributes)
            outputs = [found] if isinstance(found, Tensor) else found
            values.update(zip(node.output, outputs, strict=True))
        return values[self._output]

    def _own(
        self,
        names: Sequence[str],
        make: Callable[[Tensor, Attributes], nn.Module],
        attributes: Attributes,
    ) -> str:
        """Add the module of a weight and a bias; return its path."""
        weight, bias = (nn.Parameter(self._constants[name], False) for name in names[1:])
        path = names[1].removesuffix(".weight")
        *parents, name = path.split(".")
        holder: nn.Module = self
        for parent in parents:
            if not hasattr(holder, parent):
                holder.add_module(parent, nn.Module())
            holder = getattr(holder, parent)
        module = make(weight, attributes)
        module.weight, module.bias = weight, bias
        holder.add_module(name, module)
        return path


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return {
        name: value.decode() if isinstance(value, bytes) else value
        for name, value in values.items()
    }


def _linear(weight: Tensor, attributes: Attributes) -> nn.Module:
    n, k = weight.shape
    return nn.Linear(k, n, device="meta")


def _convolution(weight: Tensor, attributes: Attributes) -> nn.Module:
    n, channels, height, width = weight.shape
    pads, strides = attributes["pads"][:2], attributes["strides"]
    return nn.Conv2d(channels, n, (height, width), tuple(strides), tuple(pads), device="meta")


def _whole_numbers(tensor: Tensor) -> list[int]:
    return [int(number) for number in tensor.reshape(-1)]


def _reshape(given: Inputs, attributes: Attributes) -> Tensor:
    x, sizes = given
    return x.reshape(
        [x.shape[axis] if size == 0 else size for axis, size in enumerate(_whole_numbers(sizes))]
    )


def _divide(given: Inputs, attributes: Attributes) -> Tensor:
    return torch.div(*given, rounding_mode=None if given[0].is_floating_point() else "trunc")


def _split(given: Inputs, attributes: Attributes) -> Sequence[Tensor]:
    x, *sizes = given
    axis = attributes["axis"]
    if sizes:
        return torch.split(x, _whole_numbers(sizes[0]), axis)
    return torch.chunk(x, attributes["num_outputs"], axis)


def _unsqueeze(given: Inputs, attributes: Attributes) -> Tensor:
    x, axes = given
    for axis in sorted(_whole_numbers(axes)):
        x = x.unsqueeze(axis)
    return x


def _shape(given: Inputs, attributes: Attributes) -> Tensor:
    return torch.tensor(given[0].shape[attributes.get("start", 0) : attributes.get("end")])


def _norm(given: Inputs, attributes: Attributes) -> Tensor:
    x, weight, bias = given
    return functional.instance_norm(x, weight=weight, bias=bias, eps=attributes["epsilon"])


def _pool(given: Inputs, attributes: Attributes) -> Tensor:
    return functional.avg_pool2d(given[0], attributes["kernel_shape"], attributes["strides"])


def _resize(given: Inputs, attributes: Attributes) -> Tensor:
    x, scales = given
    return functional.interpolate(x, scale_factor=scales.tolist()[2:], mode=attributes["mode"])


def _elementwise(function: Callable[..., Tensor]) -> Callable[[Inputs, Attributes], Tensor]:
    return lambda given, attributes: function(*given)


MODULES: Mapping[str, Callable[[Tensor, Attributes], nn.Module]] = {
    "Conv": _convolution,
    "Gemm": _linear,
}
OPERATORS: Mapping[str, Callable[[Inputs, Attributes], Tensor | Sequence[Tensor]]] = {
    "Add": _elementwise(torch.add),
    "AveragePool": _pool,
    "Clip": _elementwise(torch.clamp),
    "Concat": lambda given, attributes: torch.cat(list(given), attributes["axis"]),
    "Cos": _elementwise(torch.cos),
    "Div": _divide,
    "Einsum": lambda given, attributes: torch.einsum(attributes["equation"], *given),
    "InstanceNormalization": _norm,
    "Log": _elementwise(torch.log),
    "Mul": _elementwise(torch.mul),
    "Pow": _elementwise(torch.pow),
    "Reciprocal": _elementwise(torch.reciprocal),
    "Reshape": _reshape,
    "Resize": _resize,
    "Shape": _shape,
    "Sigmoid": _elementwise(torch.sigmoid),
    "Sin": _elementwise(torch.sin),
    "Softmax": lambda given, attributes: torch.softmax(given[0], attributes["axis"]),
    "Split": _split,
    "Sqrt": _elementwise(torch.sqrt),
    "Squeeze": _elementwise(torch.squeeze),
    "Sub": _elementwise(torch.sub),
    "Unsqueeze": _unsqueeze,
}
