"""How the weight of a linear is stored in an engine, for the manifest."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """The codes of a weight; a linear without one has its weight in the engine's dtype."""

    format: str  # such as "int4"; "fp8" is E4M3, "nvfp4" E2M1 with scales that are E4M3
    shape: tuple[int, int]  # [n, k]
    bits: int  # of a code
    block: int  # values along k that share a scale
    is_symmetric: bool  # whether every block has the middle code as its zero
    source: str  # what made the codes
    # Of products on a CPU, of floats also in a plan: "fast" rounds x to 8 bits, of nvfp4 to 4,
    # "exact" takes it as it is.
    level: str
    embedding: str = ""  # path of the module that gathers rows of the same codes
    scales_x: bool = False  # whether x is divided by factors that are in the weight

    @property
    def is_float(self) -> bool:
        """Whether codes are floats."""
        return self.format in ("fp8", "nvfp4")

    def nbytes(self, itemsize: int) -> int:
        """Return the size of codes, scales and zeros in an ONNX file.

        Args:
            itemsize: bytes of a scale; both codes and scales of nvfp4 are bytes there.
        """
        n, k = self.shape
        if self.format == "nvfp4":
            return n * k + n * (k // self.block)
        zeros = 0 if self.is_symmetric else self.bits
        return n * k * self.bits // 8 + n * (k // self.block) * (8 * itemsize + zeros) // 8
