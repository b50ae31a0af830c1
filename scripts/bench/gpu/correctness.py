"""Every kernel that this chip gets, against float64: values, guard bytes, inputs, equal bits.

A sum of k products in float32 is off by about sqrt(k) units in the last place of the largest of its
parts, the output by half a unit of its dtype, and the tensor cores take t = x @ A as the sum of two
16-bit numbers: 2^-22 of t is lost in float16 and 2^-16 in bfloat16.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trt_lora.plugins.group import GroupBuffers, GroupShape, SiteShape
from trt_lora.plugins.launch import Chip, plan_launches, workspace_bytes
from trt_lora.runtime.dtypes import Array, storage_dtype
from trt_lora.scripts.bench.gpu.launcher import Launcher
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B
from trt_lora.scripts.bench.gpu.raw_memory import Guarded, RawMemory

DTYPES = ("float16", "bfloat16", "float32")
ROWS = (1, 2, 7, 8, 9, 33, 100, 600)
RANKS = ((16,), (1, 3, 17), (8, 16, 64), (256,), (64, 64))
_HALF_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
_LOST_OF_T = {"float16": 2.0**-22, "bfloat16": 2.0**-16, "float32": 0.0}
_FLOAT_ULP = 2.0**-24


@dataclass(frozen=True)
class KernelCase:
    """One call, and by how many bytes its buffers miss their alignment."""

    shape: GroupShape
    shift: int = 0

    @property
    def name(self) -> str:
        """The sizes, to be read."""
        shape = self.shape
        sites = ",".join(f"{site.n}r{site.rank}" for site in shape.sites)
        form = "add" if shape.adds else "delta"
        shift = f" shifted {self.shift}" if self.shift else ""
        return f"{shape.dtype} m{shape.m} k{shape.k} {sites} {form}{shift}"


@dataclass(frozen=True)
class CaseResult:
    """What a case showed."""

    name: str
    kernels: tuple[str, ...]
    relative_error: float  # ||out - ref|| / ||ref||, the worst site's
    of_allowed: float  # the worst element's error, in parts of what rounding explains
    same_bits: bool  # on a second run
    intact: bool  # guards and inputs

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong; NaN is."""
        return self.of_allowed <= 1 and self.same_bits and self.intact


def all_cases() -> Iterator[KernelCase]:
    """Yield dtypes x ranks x rows in both forms, unaligned ones, and Llama-3-8B's own groups."""
    for dtype, ranks, rows in itertools.product(DTYPES, RANKS, ROWS):
        sites = tuple(SiteShape(n, rank) for n, rank in zip((264, 72, 33), ranks, strict=False))
        for adds in (False, True):
            yield KernelCase(GroupShape(rows, 1096, sites, dtype, adds))
    for dtype, rows in itertools.product(DTYPES, (1, 8, 40)):
        item = storage_dtype(dtype).itemsize
        yield KernelCase(GroupShape(rows, 523, (SiteShape(136, 16),), dtype, True), shift=item)
    groups = LLAMA_3_8B.groups.values()
    for group, rank, rows in itertools.product(groups, (16, 64), (1, 8, 32, 200)):
        sites = tuple(SiteShape(linear.n, rank) for linear in group)
        yield KernelCase(GroupShape(rows, group[0].k, sites, "float16", True))


def check(case: KernelCase, chip: Chip, kernels: Launcher, memory: RawMemory) -> CaseResult:
    """Run one case twice and compare."""
    shape = case.shape
    inputs = _Inputs.random(shape)
    call = _Call(case, inputs, memory)
    try:
        outputs = call.run(kernels)
        again = call.run(kernels)
        intact = call.is_intact()
    finally:
        call.free()
    errors = [_errors(shape, inputs, site, output) for site, output in enumerate(outputs)]
    return CaseResult(
        case.name,
        tuple(launch.kernel for launch in plan_launches(shape, chip)),
        max(relative for relative, _ in errors),
        max(of_allowed for _, of_allowed in errors),
        all(map(_same_bits, outputs, again)),
        intact,
    )


@dataclass(frozen=True)
class _Inputs:
    """As stored."""

    x: Array
    a: tuple[Array, ...]
    b: tuple[Array, ...]
    y: tuple[Array, ...]

    @classmethod
    def random(cls, shape: GroupShape) -> "_Inputs":
        rng = np.random.default_rng((shape.m, shape.k, shape.columns))

        def draw(rows: int, columns: int, scale: float) -> Array:
            values = rng.standard_normal((rows, columns), np.float32) * np.float32(scale)
            return values.astype(storage_dtype(shape.dtype))

        return cls(
            draw(shape.m, shape.k, 1.0),
            tuple(draw(shape.k, site.rank, shape.k**-0.5) for site in shape.sites),
            tuple(draw(site.rank, site.n, site.rank**-0.5) for site in shape.sites),
            tuple(draw(shape.m, site.n, 1.0) for site in shape.sites) if shape.adds else (),
        )


class _Call:
    """The buffers of one case."""

    def __init__(self, case: KernelCase, inputs: _Inputs, memory: RawMemory) -> None:
        self._shape = case.shape

        def place(array: Array) -> Guarded:
            return Guarded(memory, array.nbytes, array, case.shift)

        self._x = place(inputs.x)
        self._a, self._b, self._y = (
            [place(array) for array in arrays] for arrays in (inputs.a, inputs.b, inputs.y)
        )
        item = inputs.x.itemsize
        self._out = [
            Guarded(memory, case.shape.m * site.n * item, shift=case.shift)
            for site in case.shape.sites
        ]
        self._workspace = Guarded(memory, workspace_bytes(case.shape))

    def run(self, kernels: Launcher) -> list[Array]:
        """Poison, launch, and return the outputs as stored."""
        for each in (*self._out, self._workspace):
            each.reset()
        a, b, y, out = map(_addresses, (self._a, self._b, self._y, self._out))
        buffers = GroupBuffers(self._x.address, a, b, y, out, self._workspace.address)
        kernels.launch(self._shape, buffers, 0)
        dtype = storage_dtype(self._shape.dtype)
        return [out.read().view(dtype).reshape(self._shape.m, -1) for out in self._out]

    def is_intact(self) -> bool:
        return all(each.is_intact() for each in self._all())

    def free(self) -> None:
        for each in self._all():
            each.free()

    def _all(self) -> list[Guarded]:
        return [self._x, *self._a, *self._b, *self._y, *self._out, self._workspace]


def _errors(shape: GroupShape, inputs: _Inputs, site: int, output: Array) -> tuple[float, float]:
    """||out - ref|| / ||ref||, and the worst element's error in parts of what is allowed."""
    x, a, b = (array.astype(np.float64) for array in (inputs.x, inputs.a[site], inputs.b[site]))
    t = x @ a
    y = inputs.y[site].astype(np.float64) if shape.adds else np.zeros((1, 1))
    expected = y + t @ b
    sums = 4 * np.sqrt(shape.k + shape.sites[site].rank) + 16
    allowed = _HALF_ULP[shape.dtype] * np.abs(expected) + _LOST_OF_T[shape.dtype] * (
        np.abs(t) @ np.abs(b)
    )
    allowed += _FLOAT_ULP * sums * (np.abs(y) + (np.abs(x) @ np.abs(a)) @ np.abs(b))
    error = np.abs(output.astype(np.float64) - expected)
    of_allowed = np.nan_to_num(error / allowed, nan=np.inf)
    relative = np.linalg.norm(error) / np.linalg.norm(expected)
    return float(np.nan_to_num(relative, nan=np.inf)), float(of_allowed.max())


def _same_bits(one: Array, other: Array) -> bool:
    return one.tobytes() == other.tobytes()


def _addresses(buffers: Sequence[Guarded]) -> tuple[int, ...]:
    return tuple(each.address for each in buffers)
