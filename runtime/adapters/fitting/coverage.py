"""Load report of an adapter: bindings, unexpected keys, ranks and cast errors per site."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trt_lora.plugins.short_repr import clipped, short_value


@dataclass(frozen=True)
class SiteCoverage:
    """One site of the engine; rank 0 means that no tensor adapts it, and dummies are bound."""

    path: str
    rank: int = 0
    scales: tuple[float, ...] = ()  # folded into B; several where parts of a fused module differ
    source_dtypes: tuple[str, ...] = ()
    dtype: str = ""
    rounding_error: float = 0.0  # largest absolute difference that a cast made, A and B
    flushed: int = 0  # values that the cast made zero
    nbytes: int = 0  # of all as it is held, in `dtype` and with zeros that pad the rank
    vectors: tuple[str, ...] = ()  # "scale", "bias": those that the adapter has beside A and B


@dataclass(frozen=True)
class Coverage:
    """The report of one load."""

    source: str
    bindings: Mapping[str, tuple[str, ...]]  # every LoRA input -> the adapter's tensors; () = dummy
    unexpected_keys: Mapping[str, str]  # tensor of the adapter -> why it has no binding
    sites: tuple[SiteCoverage, ...]  # every site of the engine, in its order
    missing_sites: tuple[str, ...] = ()  # sites that its config targets and its file leaves out
    ignored: Mapping[str, str] = field(default_factory=dict)  # tensor -> why it has no effect
    warnings: tuple[str, ...] = ()  # a line each

    def __repr__(self) -> str:
        """Return how much of the adapter and of the engine is covered."""
        return clipped(
            f"<Coverage of {short_value(self.source)}: {len(self.adapted)} of {len(self.sites)} "
            f"sites adapted, {len(self.unexpected_keys)} tensors not bound, "
            f"{len(self.ignored)} ignored, {len(self.warnings)} warnings>"
        )

    @property
    def bound(self) -> dict[str, tuple[str, ...]]:
        """The bindings that each tensor of the adapter went into."""
        found: dict[str, tuple[str, ...]] = {}
        for binding, names in self.bindings.items():
            for name in names:
                found[name] = (*found.get(name, ()), binding)
        return found

    @property
    def adapted(self) -> tuple[SiteCoverage, ...]:
        """The sites that the adapter changes."""
        return tuple(site for site in self.sites if site.rank)

    @property
    def is_taken(self) -> bool:
        """Whether a strict load takes the adapter: every tensor is bound or ignored, and some are.

        Half a pair and a shape that does not fit are errors before there is any coverage.
        """
        return not self.unexpected_keys and bool(self.adapted)

    @property
    def nbytes(self) -> int:
        """Bytes of the adapter's tensors as they are held: in the engine's dtypes, ranks padded.

        In one buffer, each begins at a multiple of 256 bytes; these gaps are not counted.
        """
        return sum(site.nbytes for site in self.sites)
