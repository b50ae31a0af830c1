"""Shape inference of new outputs from input shapes, without an execution context."""

from collections.abc import Mapping

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.manifest import Dimension, Manifest
from trt_lora.runtime.memory.tensor import Tensor


class OutputShapes:
    """Source of each output dimension: an input and its axis. Outputs in place are left out.

    TensorRT knows the shapes too, but only of a context on which all inputs are set; a captured
    graph is launched without touching one. Where a context is set, it must agree.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Look symbols up by name, as TensorRT does: equally named dimensions are equal.

        Raises:
            BackendError: an output has a symbol that no input has.
        """
        found: dict[str, tuple[str, int]] = {
            size: (binding.name, axis)
            for binding in reversed(manifest.inputs)  # the first input that has it wins
            for axis, size in enumerate(binding.shape)
            if isinstance(size, str)
        }
        new = [binding for binding in manifest.outputs if not binding.in_place_of]
        self._outputs = [
            (b.name, b.dtype, [_source(b.name, size, found) for size in b.shape]) for b in new
        ]

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return every output that needs memory of its own, still without an address."""
        found = {}
        for name, dtype, sizes in self._outputs:
            shape = tuple(d if isinstance(d, int) else inputs[d[0]].shape[d[1]] for d in sizes)
            found[name] = Tensor(0, shape, dtype)
        return found


def _source(
    output: str, size: Dimension, found: Mapping[str, tuple[str, int]]
) -> int | tuple[str, int]:
    if isinstance(size, int):
        return size
    if size not in found:
        raise BackendError(
            f"dimension {size!r} of output {output} is none of any input ({', '.join(found)}); "
            "the manifest is of another engine, build it again"
        )
    return found[size]
