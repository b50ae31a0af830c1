"""Shapes and device addresses of one grouped LoRA call."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class SiteShape:
    """Shapes of one site of a group: A [k, rank], B [rank, n], an output [m, n]."""

    n: int
    rank: int


@dataclass(frozen=True)
class GroupShape:
    """The shapes of one call: x [m, k] in row-major order, and every site's."""

    m: int  # rows: the product of x's leading dimensions
    k: int
    sites: tuple[SiteShape, ...]
    dtype: str  # of every tensor: float16, bfloat16 or float32
    has_addend: bool  # reads y [m, n] for every site and writes y + delta; otherwise delta alone

    @property
    def total_rank(self) -> int:
        """The ranks of all sites together: columns of `t = x @ [A_1 A_2 ...]`."""
        return sum(site.rank for site in self.sites)


class GroupBuffers(NamedTuple):
    """The device addresses of one call, each tuple in the order of the sites."""

    x: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    y: tuple[int, ...]  # empty without an addend
    out: tuple[int, ...]
    workspace: int
