"""Pass that gives symbolic dimensions the names of manifests and profiles.

1. Inputs and outputs get the names of the traced step, by position: the exporter calls them s17,
   s70, ...
2. Every other value that has a symbolic shape loses it: it would still speak of the old names, and
   TensorRT and ONNX Runtime infer it again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class NameDimensions(ir.passes.InPlacePass):
    """The pass, for a traced step."""

    dimensions: Callable[[str], tuple[str | None, ...]]  # of an input or output; None: a number

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rename the symbolic dimensions of `model` in place.

        Those of values in between follow from the inputs' and outputs'; one that does not is
        forgotten.
        """
        graph, names = model.graph, dict[str, str]()
        for value in (*graph.inputs, *graph.outputs):
            named = self._named_shape(value)
            names |= _renamed(value.shape, named)
            value.shape = named
        for node in graph.all_nodes():
            for value in node.outputs:
                if value.shape is not None and not value.is_graph_output():
                    value.shape = ir.Shape([_renamed_size(size, names) for size in value.shape])
        return ir.passes.PassResult(model, modified=True)

    def ensures(self, model: ir.Model) -> None:
        """Every symbolic dimension of an input or output is one of the step's."""
        for value in (*model.graph.inputs, *model.graph.outputs):
            named = {name for name in self.dimensions(str(value.name)) if name}
            sizes = value.shape or ()
            if unknown := {str(s) for s in sizes if not isinstance(s, int)} - named:
                raise ir.passes.PostconditionError(f"{value.name} has dimensions {unknown}")

    def _named_shape(self, value: ir.Value) -> ir.Shape:
        names = self.dimensions(str(value.name))
        assert value.shape is not None  # the exporter writes the shape of every input and output
        return ir.Shape([name or size for name, size in zip(names, value.shape, strict=True)])


def _renamed(old: ir.Shape | None, new: ir.Shape) -> dict[str, str]:
    return {
        str(before.value): str(after.value)
        for before, after in zip(old or (), new, strict=True)
        if isinstance(before, ir.SymbolicDim) and isinstance(after, ir.SymbolicDim)
    }


def _renamed_size(size: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    return size if isinstance(size, int) else names.get(str(size.value))
