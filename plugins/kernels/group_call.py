"""Shapes and device addresses of one grouped LoRA call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trt_lora.plugins.kernels.constants import RANK_TILE, VECTOR_BYTES


@dataclass(frozen=True)
class SiteShape:
    """Shapes of one site of a group: A [k, rank], B [rank, n], an output [m, n]."""

    n: int
    rank: int

    @property
    def rank_tiles(self) -> int:
        """Tiles of `RANK_TILE` ranks, each of them a warp's."""
        return -(-self.rank // RANK_TILE)


@dataclass(frozen=True)
class StackShape:
    """Stacks of adapters, one for each row: A [slots, k, rank] and B [slots, rank, n] of a site."""

    slots: int
    sites: int  # of the engine: the width of `lora_rank`
    columns: tuple[int, ...]  # of `lora_rank`, for each site of the group


@dataclass(frozen=True)
class GroupShape:
    """The shapes of one call: x [m, k] in row-major order, and every site's."""

    m: int  # rows: the product of x's leading dimensions
    k: int
    sites: tuple[SiteShape, ...]
    dtype: str  # of every tensor: float16, bfloat16 or float32
    has_addend: bool  # reads y [m, n] for every site and writes y + delta; otherwise delta alone
    stacks: StackShape | None = None  # every row has an adapter of its own; else one for all

    @property
    def total_rank(self) -> int:
        """The ranks of all sites together: columns of `t = x @ [A_1 A_2 ...]`."""
        return sum(site.rank for site in self.sites)

    @property
    def rank_tiles(self) -> int:
        """Those of all sites together."""
        return sum(site.rank_tiles for site in self.sites)


class GroupBuffers(NamedTuple):
    """The device addresses of one call, each sequence in the order of the sites."""

    x: int
    a: Sequence[int]
    b: Sequence[int]
    y: Sequence[int]  # empty without an addend
    out: Sequence[int]
    workspace: int
    slot: int = 0  # with stacks: of each row [m] int32
    rank: int = 0  # with stacks: [slots, sites of the engine] int32

    @property
    def aligned(self) -> bool:
        """Whether every vector of `VECTOR_BYTES` is one load: TensorRT's own addresses are."""
        return not any(
            address % VECTOR_BYTES for address in (self.x, *self.a, *self.b, *self.y, *self.out)
        )
