"""Pass that removes the exporter's metadata: nine tenths of the file, and paths of the builder.

1. Metadata and doc strings of the model, its graphs, functions and nodes go.
2. So does the metadata of every value, which onnx_ir's own pass leaves.
"""

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass


class ClearMetadata(ClearMetadataAndDocStringPass):
    """The pass."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Clear everything in place."""
        super().call(model)
        model.metadata_props.clear()
        model.graph.metadata_props.clear()
        graph = model.graph
        outputs = (value for node in graph.all_nodes() for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *outputs):
            value.metadata_props.clear()
        return ir.passes.PassResult(model, modified=True)
