"""An engine's inputs and outputs as its own file has them, compared with its manifest."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.messages import listed
from trt_lora.runtime.manifest import Binding, Manifest


@dataclass(frozen=True)
class Port:
    """An input or output of a graph or plan."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]  # None: of any size


def check_interface(
    file: object,
    manifest: Manifest,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    *,
    are_shapes_known: bool = True,
) -> None:
    """Refuse a file that the manifest does not speak of, by names, dtypes and shapes.

    Args:
        file: the graph or plan, for messages.
        manifest: that of its directory.
        inputs: of the file, in any order.
        outputs: of the file, in any order.
        are_shapes_known: a dimension of any size in the file is one in the manifest too.

    Raises:
        BackendError: they differ; the message says where.
    """
    for kind, found, expected in (
        ("inputs", inputs, manifest.inputs),
        ("outputs", outputs, manifest.outputs),
    ):
        if differences := list(_differences(found, expected, are_shapes_known)):
            raise BackendError(
                f"{file} has other {kind} than its manifest: {listed(differences, '; ')}; copy or "
                "build the engine again"
            )


def _differences(
    found: Sequence[Port], expected: Sequence[Binding], are_shapes_known: bool
) -> Iterable[str]:
    ports = {port.name: port for port in found}
    names = [binding.name for binding in expected]
    yield from (f"no {name}" for name in names if name not in ports)
    yield from (f"{name} too" for name in ports if name not in names)
    for binding in expected:
        port = ports.get(binding.name)
        if port is not None and not _is_same(port, binding, are_shapes_known):
            shape = [size if size is not None else "any" for size in port.shape]
            yield (
                f"{binding.name} is {port.dtype} {shape}, and not {binding.dtype} "
                f"{list(binding.shape)}"
            )


def _is_same(port: Port, binding: Binding, are_shapes_known: bool) -> bool:
    """Whether dtype and shape are; a symbol of the manifest is a dimension of any size."""
    sizes = [size if isinstance(size, int) else None for size in binding.shape]
    if len(sizes) != len(port.shape) or port.dtype != binding.dtype:
        return False
    pairs = zip(port.shape, sizes, strict=True)
    return all(has == says or (has is None and not are_shapes_known) for has, says in pairs)
