"""Inputs and outputs of a fake TensorRT's engine, as `ICudaEngine` tells them."""

from collections.abc import Iterator
from enum import Enum, IntEnum

from trt_lora.runtime.manifest import Binding, Manifest


class Dims:
    """A shape as TensorRT gives it: no tuple, but tuple() takes it."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        """Return the number of dimensions."""
        return len(self._sizes)

    def __getitem__(self, axis: int) -> int:
        """Return one size."""
        return self._sizes[axis]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the sizes."""
        return iter(self._sizes)


class TensorIOMode(IntEnum):
    """What a tensor is to an engine."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


class DataType(Enum):
    """TensorRT's names of dtypes."""

    FLOAT = "float32"
    HALF = "float16"
    BF16 = "bfloat16"
    INT32 = "int32"
    INT64 = "int64"
    BOOL = "bool"


class EngineInterface:
    """The part of `ICudaEngine` that says what it takes and gives."""

    def __init__(self, manifest: Manifest) -> None:
        """Be the plan that a manifest speaks of."""
        self.inputs, self.outputs = manifest.inputs, manifest.outputs

    @property
    def num_io_tensors(self) -> int:
        """How many inputs and outputs there are."""
        return len(self.inputs) + len(self.outputs)

    def get_tensor_name(self, index: int) -> str:
        """Return the name of one."""
        return (*self.inputs, *self.outputs)[index].name

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        """Return what it is."""
        is_input = any(binding.name == name for binding in self.inputs)
        return TensorIOMode.INPUT if is_input else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        """Return its dtype."""
        return DataType(self._binding(name).dtype)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return its shape, -1 where that changes."""
        sizes = self._binding(name).shape
        return tuple(size if isinstance(size, int) else -1 for size in sizes)

    def _binding(self, name: str) -> Binding:
        return next(b for b in (*self.inputs, *self.outputs) if b.name == name)
