"""Paths of the modules that nodes of a graph come from, by what the exporter has left of them.

1. Metadata of torch's exporter (`pkg.torch.onnx.name_scopes`).
2. The scope in a node's name, of TorchScript, optimum and genai: `/layers.0/fc1/MatMul`.
3. The name of the weight, where this node alone reads it: `layers.0.fc1.weight`.

Names of biases are wrong once an exporter has merged equal ones, and numbers are its own: neither
is a path.
"""

import re
from dataclasses import dataclass, field
from itertools import pairwise

import onnx_ir as ir

from trt_lora.builder.passes.foreign.site_map import SiteMap
from trt_lora.builder.passes.linears import recorded_path

_OPERATION = re.compile(r"[A-Z]\w*")  # at the end of a scope; a module's name begins otherwise
_WEIGHT = re.compile(r"(?P<path>[^/:]+?)(\.MatMul)?\.(q?weight|weight_(Q\d+|quantized))")


@dataclass(frozen=True)
class ModuleNames:
    """Module paths as an engine has them."""

    prefix: str = ""  # in front of every path
    site_map: SiteMap = field(default_factory=SiteMap)

    def path(self, node: ir.Node, weight: ir.Value) -> str:
        """Return the path of a product's module; empty where nothing says it.

        Args:
            node: of the product.
            weight: what the graph stores of its weight.
        """
        found = self.scope(node) or _of_weight(weight)
        if not found:
            return self.site_map.named(label(node))
        return self.site_map.renamed(f"{self.prefix}.{found}" if self.prefix else found)

    @staticmethod
    def scope(node: ir.Node) -> str:
        """Return the module whose call a node is of, as exporters record it; empty: none does."""
        recorded = recorded_path(node)
        is_path = recorded and "(" not in recorded  # of `layers[1:]` it is `layers.slice(1, ..).0`
        return recorded if is_path else _of_node(str(node.name or ""))


def label(node: ir.Node) -> str:
    """Return what a node is called, or else its first output, which always has a name."""
    return str(node.name or node.outputs[0].name)


def _of_node(name: str) -> str:
    """The modules of `/layers/layers.0/fc1/MatMul_1`: a list is named by its items alone."""
    if not name.startswith("/"):
        return ""
    *modules, operation = name.strip("/").split("/")
    if not _OPERATION.fullmatch(operation):
        return ""
    pairs = pairwise([*modules, ""])
    return ".".join(one for one, then in pairs if not then.startswith(f"{one}."))


def _of_weight(weight: ir.Value) -> str:
    """The path in a weight's own name; a weight with several readers is named for one of them."""
    match = _WEIGHT.fullmatch(str(weight.name))
    return match["path"] if match and len(weight.uses()) == 1 else ""
