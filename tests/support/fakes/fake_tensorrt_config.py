"""How contexts of a fake TensorRT are made, and the kernels that one of TensorRT-RTX keeps."""

from enum import IntEnum
from typing import Any


class AllocationStrategy(IntEnum):
    """Who allocates the memory of a context."""

    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class SpecializationStrategy(IntEnum):
    """When TensorRT-RTX compiles kernels for shapes."""

    LAZY = 0
    EAGER = 1
    NONE = 2


class IRuntimeConfig:
    """How contexts are made."""

    def __init__(self) -> None:
        self.strategy = AllocationStrategy.STATIC
        self.dynamic_shapes_kernel_specialization_strategy = SpecializationStrategy.LAZY
        self.cache: IRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: AllocationStrategy) -> None:
        """Say who allocates."""
        self.strategy = strategy


class IRuntimeConfigOfRTX(IRuntimeConfig):
    """TensorRT-RTX compiles kernels when it runs, and can keep them."""

    def __init__(self, trt: Any) -> None:
        super().__init__()
        self._trt = trt

    def create_runtime_cache(self) -> "IRuntimeCache":
        """Return an empty cache."""
        return IRuntimeCache(self._trt)

    def set_runtime_cache(self, cache: "IRuntimeCache") -> bool:
        """Use a cache."""
        self.cache = cache
        return True


class IRuntimeCache:
    """Names of compiled kernels."""

    def __init__(self, trt: Any) -> None:
        self._trt = trt
        self.kernels: set[str] = set()

    def serialize(self) -> bytes | None:
        """Return the cache as a file holds it, or None."""
        if "serialize" in self._trt.refusals:
            return None
        return b"\n".join([self._trt.environment, *(k.encode() for k in sorted(self.kernels))])

    def deserialize(self, blob: bytes) -> bool:
        """Take what a file holds, if it was made here."""
        environment, *kernels = blob.split(b"\n")
        if environment != self._trt.environment:
            return False
        self.kernels = {kernel.decode() for kernel in kernels}
        return True
