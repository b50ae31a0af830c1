"""Inputs of a graph as a manifest lists them."""

import onnx_ir as ir

from trt_lora.runtime.manifest import Binding


def graph_inputs(model: ir.Model) -> list[Binding]:
    """Return them in their order."""
    found = []
    for value in model.graph.inputs:
        assert value.shape is not None
        assert value.dtype is not None
        sizes = tuple(n if isinstance(n, int) else str(n.value) for n in value.shape)
        found.append(Binding(str(value.name), value.dtype.numpy().name, sizes))
    return found
