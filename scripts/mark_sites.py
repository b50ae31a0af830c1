"""Make the input and the result of every LoRA site outputs of the graph."""

from collections.abc import Iterable

import onnx_ir as ir

from trt_lora.scripts.site_calls import SiteCall


def mark_sites(model: ir.Model, calls: Iterable[SiteCall], *, deltas: bool) -> None:
    """Make what every call reads and adds an output of the graph, in the order of the graph.

    `<path>.x` is what it reads, `<path>.y` linear, bias and delta, `<path>.residual` what the graph
    adds in the same place. `deltas` adds `<path>.delta`. A second call of a site is `<path>#2`.
    """
    counts: dict[str, int] = {}
    for call in calls:
        count = counts[call.path] = counts.get(call.path, 0) + 1
        label = call.path if count == 1 else f"{call.path}#{count}"
        _mark(model.graph, f"{label}.x", call.x)
        _mark(model.graph, f"{label}.y", call.output, call.residual)
        if call.residual is not None:
            _mark(model.graph, f"{label}.residual", call.residual)
        if deltas:
            _mark(model.graph, f"{label}.delta", call.result, call.addend)


def _mark(graph: ir.Graph, name: str, value: ir.Value, minus: ir.Value | None = None) -> None:
    operands = [value] if minus is None else [value, minus]
    node = ir.node("Identity" if minus is None else "Sub", operands, name=name)
    (output,) = node.outputs
    output.name, output.type, output.shape = name, value.type, value.shape
    graph.append(node)
    graph.outputs.append(output)
