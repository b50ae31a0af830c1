"""Nodes as the exporter leaves them: with the module that each came from."""

import onnx_ir as ir

LINEAR = "torch.nn.modules.linear.Linear"


def come_from(node: ir.Node, path: str, kind: str = LINEAR) -> None:
    """Write the exporter's metadata: the node comes from a module of class `kind` at `path`."""
    scopes, classes = ["", "model_", f"model_.{path}", "linear"], ["C", "M", kind, "aten"]
    node.metadata_props["pkg.torch.onnx.name_scopes"] = repr(scopes)
    node.metadata_props["pkg.torch.onnx.class_hierarchy"] = repr(classes)
