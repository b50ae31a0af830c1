"""Calls of the operator with random inputs, and those that every GPU is checked with."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from kernels.oracle import Float64, Inputs, error_bounds, exact_outputs, worst_error

from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.runtime.memory.dtypes import Array, storage_dtype

DTYPES = ("float32", "float16", "bfloat16")
_ROWS = (1, 2, 7, 8, 9, 33, 100, 600)
_RANKS = ((16,), (1, 3, 17), (8, 16, 64), (256,), (64, 64))
_LLAMA_3_8B = (  # k, and the n of linears that read one x
    (4096, (4096, 1024, 1024)),
    (4096, (4096,)),
    (4096, (14336, 14336)),
    (14336, (4096,)),
)


@dataclass(frozen=True)
class Sizes:
    """One call without its inputs."""

    shape: GroupShape
    shift: int = 0  # bytes by which every buffer misses its alignment

    @property
    def aligned(self) -> bool:
        """Whether the buffers are aligned, as `plan_launches` asks."""
        return self.shift == 0

    @property
    def name(self) -> str:
        """The sizes, to be read."""
        shape = self.shape
        sites = ",".join(f"{site.n}r{site.rank}" for site in shape.sites)
        form = "add" if shape.has_addend else "delta"
        shift = f"-shifted{self.shift}" if self.shift else ""
        return f"{shape.dtype}-m{shape.m}-k{shape.k}-{sites}-{form}{shift}"


def checked_sizes() -> Iterator[Sizes]:
    """Yield dtypes x ranks x rows in both forms, unaligned ones, and Llama-3-8B's own groups."""
    for dtype, ranks, rows in itertools.product(DTYPES, _RANKS, _ROWS):
        sites = tuple(SiteShape(n, rank) for n, rank in zip((264, 72, 33), ranks, strict=False))
        for has_addend in (False, True):
            yield Sizes(GroupShape(rows, 1096, sites, dtype, has_addend))
    for dtype, rows in itertools.product(DTYPES, (1, 8, 40)):
        shape = GroupShape(rows, 523, (SiteShape(136, 16),), dtype, True)
        yield Sizes(shape, shift=storage_dtype(dtype).itemsize)
    for (k, widths), rank, rows in itertools.product(_LLAMA_3_8B, (16, 64), (1, 8, 32, 200)):
        sites = tuple(SiteShape(n, rank) for n in widths)
        yield Sizes(GroupShape(rows, k, sites, "float16", True))


@dataclass(frozen=True)
class Call:
    """Shapes and inputs."""

    shape: GroupShape
    inputs: Inputs

    def expected(self) -> list[Float64]:
        """See `exact_outputs`."""
        return exact_outputs(self.inputs)

    def bounds(self) -> list[Float64]:
        """See `error_bounds`."""
        return error_bounds(self.shape, self.inputs)

    def worst(self, outputs: Sequence[Array]) -> float:
        """See `worst_error`."""
        return worst_error(self.shape, self.inputs, outputs)


def random_call(shape: GroupShape) -> Call:
    """Return a call with normally distributed values; x, t, y and the delta are of size one."""
    random = np.random.default_rng((shape.m, shape.k, shape.total_rank))

    def normal(rows: int, columns: int, scale: float = 1.0) -> Array:
        values = random.standard_normal((rows, columns), np.float32) * np.float32(scale)
        return values.astype(storage_dtype(shape.dtype))

    inputs = Inputs(
        normal(shape.m, shape.k),
        tuple(normal(shape.k, site.rank, shape.k**-0.5) for site in shape.sites),
        tuple(normal(site.rank, site.n, site.rank**-0.5) for site in shape.sites),
        tuple(normal(shape.m, site.n) for site in shape.sites) if shape.has_addend else (),
    )
    return Call(shape, inputs)


def make_call(
    m: int,
    k: int,
    sites: Sequence[tuple[int, int]],  # (n, rank) of each
    dtype: str,
    *,
    has_addend: bool = True,
) -> Call:
    """Return a random call of these sizes."""
    shapes = tuple(SiteShape(n, rank) for n, rank in sites)
    return random_call(GroupShape(m, k, shapes, dtype, has_addend))
