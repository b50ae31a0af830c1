"""vLLM's `LoRALayerWeights`: A, B and scale of a linear layer, or of the parts of a fused one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.memory.dtypes import Array, Float32


@short_repr
@dataclass(frozen=True, eq=False)
class LoRALayerWeights:
    """y + scaling * (x @ A) @ B; vLLM's `embeddings_tensor` and `bias` are refused at load."""

    lora_a: Array  # [in, rank]
    lora_b: Array  # [rank, out]
    scaling: float = 1.0

    def __post_init__(self) -> None:
        """Check the shapes.

        Raises:
            AdapterError: these are no two matrices of one rank.
        """
        a, b = self.lora_a.shape, self.lora_b.shape
        if len(a) != 2 or len(b) != 2 or a[1] != b[0]:
            raise AdapterError(
                f"lora_a has shape {list(a)} and lora_b {list(b)}, expected [in, rank] and "
                "[rank, out]"
            )

    @property
    def rank(self) -> int:
        """The number of A's columns."""
        return int(self.lora_a.shape[1])

    @property
    def is_packed(self) -> bool:
        """Whether these are the parts of a fused layer."""
        return False

    def optimize(self) -> "LoRALayerWeights":
        """Return the same with the scale folded into B, in float32; in place in vLLM."""
        if self.scaling == 1:
            return self
        scaled = self.lora_b.astype(np.float32) * np.float32(self.scaling)
        return replace(self, lora_b=scaled, scaling=1.0)

    def compute_delta_weight(self) -> Float32:
        """Return scaling * A @ B, [in, out], what the layer adds to its weight."""
        a, b = self.lora_a.astype(np.float32), self.lora_b.astype(np.float32)
        return np.float32(self.scaling) * (a @ b)


@short_repr
@dataclass(frozen=True, eq=False)
class PackedLoRALayerWeights:
    """The parts of a fused layer in the order of its outputs; None is a part not adapted."""

    parts: tuple[LoRALayerWeights | None, ...]

    @classmethod
    @checked
    def pack(cls, loras: Sequence[LoRALayerWeights | None]) -> "PackedLoRALayerWeights":
        """Return the layers of q, k and v, or of gate and up, as those of one.

        Raises:
            AdapterError: none of them is adapted.
        """
        if not any(loras):
            raise AdapterError("no part of the fused layer is adapted; leave the layer out")
        return cls(tuple(loras))

    @property
    def lora_a(self) -> list[Array | None]:
        """A of every part."""
        return [None if part is None else part.lora_a for part in self.parts]

    @property
    def lora_b(self) -> list[Array | None]:
        """B of every part."""
        return [None if part is None else part.lora_b for part in self.parts]

    @property
    def scaling(self) -> list[float]:
        """The scale of every part; 1 where it is not adapted."""
        return [1.0 if part is None else part.scaling for part in self.parts]

    @property
    def rank(self) -> int:
        """The largest rank of a part."""
        return max(part.rank for part in self.parts if part is not None)

    @property
    def is_packed(self) -> bool:
        """Whether these are the parts of a fused layer."""
        return True

    def optimize(self) -> "PackedLoRALayerWeights":
        """Return the same with every scale folded into its B; in place in vLLM."""
        return replace(self, parts=tuple(part and part.optimize() for part in self.parts))
