"""Calls in which every row has an adapter of its own, and what each row should be by itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from kernels.calls import Call
from kernels.oracle import Inputs, worst_error

from trt_lora.plugins.contract.slots import BASE_SLOT as BASE
from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape, StackShape
from trt_lora.plugins.kernels.launch_plan import Launch
from trt_lora.plugins.kernels.nvrtc import SLOTS
from trt_lora.runtime.memory.dtypes import Array, storage_dtype

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SlotCall(Call):
    """A call with stacks; `shape` has their ranks."""

    @property
    def slot(self) -> Numbers:
        """The slot of each row; what is no slot is the base model."""
        return self.inputs.rows[0]

    def worst(self, outputs: Sequence[Array]) -> float:
        """Return the worst error of the rows of each adapter, as `Call.worst` has it."""
        return max(
            worst_error(shape, inputs, [out[rows] for out in outputs])
            for rows, shape, inputs in self._parts()
        )

    def with_slots(self, slot: Sequence[int] | Numbers) -> "SlotCall":
        """Return the same call where the rows take other slots."""
        rows = (np.asarray(slot, np.int32), self.inputs.rows[1])
        return SlotCall(self.shape, replace(self.inputs, rows=rows))

    def _parts(self) -> Iterator[tuple[npt.NDArray[np.bool_], GroupShape, Inputs]]:
        """The rows of each adapter as a call of their own; those of the base model one of zeros."""
        assert self.shape.stacks is not None
        for slot in np.unique(self.slot):
            rows = self.slot == slot
            is_base = not 0 <= slot < self.shape.stacks.slots
            factors = [self._factors(site, BASE if is_base else slot) for site in self._sites]
            sites = tuple(SiteShape(b.shape[1], len(b)) for _, b in factors)
            shape = replace(self.shape, m=int(rows.sum()), sites=sites, stacks=None)
            a, b = zip(*factors, strict=True)
            yield (
                rows,
                shape,
                Inputs(self.inputs.x[rows], a, b, tuple(y[rows] for y in self.inputs.y)),
            )

    @property
    def _sites(self) -> range:
        return range(len(self.shape.sites))

    def _factors(self, site: int, slot: int) -> tuple[Array, Array]:
        """A [k, rank] and B [rank, n] of the adapter in a slot; without one, of rank 1 and zero."""
        assert self.shape.stacks is not None
        a, b = self.inputs.a[site][slot], self.inputs.b[site][slot]
        rank = self.inputs.rows[1][slot, self.shape.stacks.columns[site]] if slot != BASE else 0
        if rank == 0:
            return np.zeros_like(a[:, :1]), np.zeros_like(b[:1])
        return a[:, :rank], b[:rank]


def slot_call(
    slot: Sequence[int] | Numbers,
    k: int,
    sites: Sequence[tuple[int, int]],  # n, and the rank of the stacks
    ranks: Sequence[Sequence[int]],  # of each slot, for each site
    dtype: str,
    *,
    has_addend: bool = True,
) -> SlotCall:
    """Return a random call; what lies behind a rank, and in slots that no row takes, is NaN.

    The engine has two sites more, and the group's are the last in another order.
    """
    slots, rows = len(ranks), np.asarray(slot, np.int32)
    columns = tuple(len(sites) + 1 - site for site in range(len(sites)))
    stacks = StackShape(slots, len(sites) + 2, columns)
    shapes = tuple(SiteShape(n, room) for n, room in sites)
    shape = GroupShape(len(rows), k, shapes, dtype, has_addend, stacks)
    random = np.random.default_rng((len(rows), k, shape.total_rank))

    def normal(*sizes: int, scale: float = 1.0) -> Array:
        values = random.standard_normal(sizes, np.float32) * np.float32(scale)
        return values.astype(storage_dtype(dtype))

    every_a, every_b = [], []
    of_slots = np.full((slots, stacks.sites), 99, np.int32)
    for site, (n, room) in enumerate(sites):
        a = normal(slots, k, room, scale=k**-0.5)
        b = normal(slots, room, n, scale=room**-0.5)
        for index, own in enumerate(ranks):
            a[index, :, own[site] :], b[index, own[site] :] = np.nan, np.nan
            of_slots[index, columns[site]] = own[site]
            if index not in rows:
                a[index], b[index] = np.nan, np.nan
        every_a.append(a)
        every_b.append(b)
    x = normal(len(rows), k)
    y = tuple(normal(len(rows), n) for n, _ in sites) if has_addend else ()
    return SlotCall(shape, Inputs(x, tuple(every_a), tuple(every_b), y, (rows, of_slots)))


def with_passes_at_once(launches: Sequence[Launch], count: int) -> tuple[Launch, ...]:
    """Return the launches with so many passes of a tile under way at once."""

    def grid(launch: Launch) -> tuple[int, int, int]:
        width, height, _ = launch.grid
        is_decode = launch.kernel.startswith(f"{SLOTS}decode")
        return (count * launch.cluster, height, 1) if is_decode else (width, height, count)

    return tuple(replace(launch, grid=grid(launch)) for launch in launches)
