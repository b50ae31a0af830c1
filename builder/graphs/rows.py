"""Rows of a graph: the entries of its batch dimension, which may take adapters of their own."""

import onnx_ir as ir

from trt_lora.builder.graphs.config import GraphConfig
from trt_lora.plugins.errors import ConfigError, ModelError

BATCHES = ("batch", "batch_size")  # as exporters call it
_LEAST_OPSET = 15  # of what computes the slot of each token


def batch_symbol(model: ir.Model, config: GraphConfig) -> str:
    """Return the name of the dimension that counts rows; empty where there is none.

    Raises:
        ConfigError: the options need one, and no input begins with it.
        ModelError: the graph's operators are too old for many adapters in a batch.
    """
    first = {str(value.shape[0]) for value in model.graph.inputs if value.shape}
    wanted = (config.batch,) if config.batch else BATCHES
    found = next((name for name in wanted if name in first), "")
    if not found and (config.batch or config.max_loras):
        raise ConfigError(
            f"no input of {config.onnx} begins with a dimension {' or '.join(wanted)}, whose "
            f"entries could take adapters of their own; inputs begin with: "
            f"{', '.join(sorted(first)) or 'none'}. Name one of these with --batch, export the "
            "graph with a dynamic batch, or leave out --max-loras"
        )
    if config.max_loras and (opset := model.graph.opset_imports[""]) < _LEAST_OPSET:
        raise ModelError(
            f"{config.onnx} has opset {opset}, and many adapters in a batch need {_LEAST_OPSET}; "
            "export it with a newer one, or leave out --max-loras"
        )
    return found
