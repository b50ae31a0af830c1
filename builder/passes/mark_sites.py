"""Pass that makes the input and the result of every LoRA site graph outputs.

1. `<path>.x` is what a site reads, `<path>.y` its linear, bias and delta.
2. `<path>.residual` is what the graph adds in the same place; `<path>.y` is without it.
3. `<path>.delta`, if asked for, is what LoRA adds. A second call of a site is `<path>#2`.
"""

from collections import Counter
from dataclasses import dataclass

import onnx_ir as ir

from trt_lora.builder.passes.site_calls import SiteCall, site_calls


@dataclass(frozen=True)
class MarkSites(ir.passes.InPlacePass):
    """The pass."""

    deltas: bool = False

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the outputs, in the order of the graph.

        Raises:
            ModelError: a LoRA node is not as the insertion pass leaves it.
        """
        counts = Counter[str]()
        for call in list(site_calls(model)):
            counts[call.path] += 1
            count = counts[call.path]
            self._mark_call(model.graph, call.path if count == 1 else f"{call.path}#{count}", call)
        return ir.passes.PassResult(model, modified=bool(counts))

    def _mark_call(self, graph: ir.Graph, label: str, call: SiteCall) -> None:
        _mark(graph, f"{label}.x", call.x)
        _mark(graph, f"{label}.y", call.output, call.residual)
        if call.residual is not None:
            _mark(graph, f"{label}.residual", call.residual)
        if self.deltas:
            _mark(graph, f"{label}.delta", call.result, call.addend)


def _mark(graph: ir.Graph, name: str, value: ir.Value, minus: ir.Value | None = None) -> None:
    operands = [value] if minus is None else [value, minus]
    node = ir.node("Identity" if minus is None else "Sub", operands, name=name)
    (output,) = node.outputs
    output.name, output.type, output.shape = name, value.type, value.shape
    graph.append(node)
    graph.outputs.append(output)
