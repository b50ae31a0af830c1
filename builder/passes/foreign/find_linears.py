"""Linears of a graph by any exporter, each with a path that tells its module from all others.

1. A linear is a product with a constant weight (`weights.py`) whose module has a path (`names.py`).
2. A weight that several products read is one site if all are calls of one module by their scopes,
   of which TorchScript numbers the second (`fc_1`); else an adapter for one would change the others
   too, and none is a site.
3. A path that products of several weights have is none.
4. What is inside another node's subgraph is left alone.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.foreign.names import ModuleNames, label
from trt_lora.builder.passes.foreign.weights import (
    MICROSOFT,
    NoWeightError,
    ProductWeight,
    product_weight,
)
from trt_lora.builder.passes.linears import Linear, recorded_refusal, source_of
from trt_lora.plugins.messages import listed


@dataclass(frozen=True)
class _Reader:
    """A product with a constant weight."""

    node: ir.Node
    weight: ProductWeight
    path: str


def find_graph_linears(model: ir.Model, names: ModuleNames) -> Iterator[Linear]:
    """Yield every matrix product and convolution in order, as a linear or with a refusal."""
    found, refused = _products(model, names)
    products = _as_calls(found)
    refused |= {each.node: why for each in products if (why := _refusal(each))}
    refused |= _ambiguous(products)
    inside = (each.node for each in products if each.node.graph is not model.graph)
    refused |= dict.fromkeys(inside, "it is inside another node's subgraph")
    by_node = {each.node: each for each in products}
    for node in model.graph.all_nodes():
        if node in by_node or node in refused:
            yield _linear(node, by_node.get(node), refused.get(node, ""))


def _products(model: ir.Model, names: ModuleNames) -> tuple[list[_Reader], dict[ir.Node, str]]:
    """Products with a constant weight, subgraphs' too, and why others have none."""
    products, refused = list[_Reader](), dict[ir.Node, str]()
    for node in model.graph.all_nodes():
        try:
            if (weight := product_weight(node)) is not None:
                products.append(_Reader(node, weight, names.path(node, weight.root)))
        except NoWeightError as reason:
            refused[node] = str(reason)
    return products, refused


def _linear(node: ir.Node, product: _Reader | None, refusal: str) -> Linear:
    if product is None or refusal:
        path = product.path if product else ""
        return Linear(node, path or ModuleNames.scope(node) or label(node), refusal=refusal)
    if node.outputs[0].dtype is None:  # shape inference stops at operators that it does not know
        node.outputs[0].type = ir.TensorType(product.weight.dtype)
    k, n = product.weight.shape
    return Linear(node, product.path, k, n, window=product.weight.window)


def _refusal(product: _Reader) -> str:
    """Why a product by itself is no site; empty if it may be one."""
    node, x = product.node, source_of(gv.present(product.node.inputs[0]))
    if not product.path:
        return "nothing in the graph names its module; --site-map can"
    if product.weight.window is None and (reason := recorded_refusal(node)):
        return reason
    if x.dtype not in (None, product.weight.dtype):
        return f"its input is {x.dtype.name}, and its weight {product.weight.dtype.name}"
    if x.shape is not None and len(x.shape) < 2:
        return "its input is a vector"
    return ""


def _as_calls(products: list[_Reader]) -> list[_Reader]:
    """The same with one path where all that read a weight are calls of one module."""
    readers = defaultdict[ir.Value, set[str]](set)
    for each in products:
        readers[each.weight.root].add(each.path if ModuleNames.scope(each.node) else "")
    modules = {
        weight: first
        for weight, paths in readers.items()
        for first in (min(paths, key=len),)
        if first and all(_is_call(path, first) for path in paths)
    }
    return [replace(each, path=modules.get(each.weight.root, each.path)) for each in products]


def _is_call(path: str, module: str) -> bool:
    """Whether a path is a module's own, or has numbers behind its names: `block_1.fc`."""
    numbered = r"(_\d+)?\.".join(map(re.escape, module.split(".")))
    return re.fullmatch(rf"{numbered}(_\d+)?", path) is not None


def _ambiguous(products: list[_Reader]) -> dict[ir.Node, str]:
    """Products whose weight or path is also that of others, and why none of them is a site."""
    modules, weights = defaultdict[ir.Value, set[str]](set), defaultdict[str, set[ir.Value]](set)
    for each in products:
        is_call = ModuleNames.scope(each.node)  # of a module that may have others
        modules[each.weight.root].add(each.path if is_call else label(each.node))
        weights[each.path].add(each.weight.root)
    refused = dict[ir.Node, str]()
    for each in products:
        if len(readers := modules[each.weight.root]) > 1:
            refused[each.node] = f"its weight is read by {listed(sorted(readers))}, not by it alone"
        elif each.path and len(weights[each.path]) > 1:
            refused[each.node] = f"{len(weights[each.path])} weights have this path"
    return refused


def fused_widths(linear: Linear) -> tuple[int, ...]:
    """Return the widths of q, k and v that ONNX Runtime's attention splits y into; empty: none."""
    y = linear.y
    for use in y.uses():
        if use.node.op_type == "Add" and len(y.uses()) == 1:  # a bias
            y = use.node.outputs[0]
    for use in y.uses():
        node = use.node
        is_packed = len(node.inputs) > 2 and node.inputs[1] is None and node.inputs[2] is None
        if (node.domain, node.op_type) == (MICROSOFT, "GroupQueryAttention") and is_packed:
            heads, shared = (node.attributes[n].as_int() for n in ("num_heads", "kv_num_heads"))
            width = linear.n // (heads + 2 * shared)
            return heads * width, shared * width, shared * width
    return ()
