"""Shapes of a decoder layer's linears, grouped by shared input: Llama-3-8B's by default."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class LinearShape:
    """`y [m, n] = x [m, k] @ W`, with A [k, rank] and B [rank, n] beside it."""

    name: str
    k: int
    n: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder without its attention: what of it LoRA is measured against."""

    hidden: int = 4096
    keys: int = 1024  # width of k and of v
    inner: int = 14336
    vocabulary: int = 128256
    layers: int = 32

    @property
    def groups(self) -> Mapping[str, tuple[LinearShape, ...]]:
        """Linears by group, in the order in which a layer runs them."""
        hidden, keys, inner = self.hidden, self.keys, self.inner
        return MappingProxyType(
            {
                "qkv": (
                    LinearShape("q", hidden, hidden),
                    LinearShape("k", hidden, keys),
                    LinearShape("v", hidden, keys),
                ),
                "o": (LinearShape("o", hidden, hidden),),
                "gate_up": (LinearShape("gate", hidden, inner), LinearShape("up", hidden, inner)),
                "down": (LinearShape("down", inner, hidden),),
            }
        )

    @property
    def linears(self) -> tuple[LinearShape, ...]:
        """All linears of a layer."""
        return tuple(linear for group in self.groups.values() for linear in group)


LLAMA_3_8B = ModelShape()
