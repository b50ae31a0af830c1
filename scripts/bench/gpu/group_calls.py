"""Calls of one group of linears on random adapters, by our kernels and by cuBLAS."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape, SiteShape, StackShape
from trt_lora.plugins.kernels.launch_plan import workspace_bytes
from trt_lora.scripts.bench.gpu.contestants import can_be_early
from trt_lora.scripts.bench.gpu.device import CudaDevice, LaunchCall
from trt_lora.scripts.bench.gpu.row_mixes import mix
from trt_lora.scripts.bench.llama import LinearShape

SLOTS = 8
ONE_ADAPTER = "one adapter"  # of all rows: an engine without slots

Tensors = Sequence[torch.Tensor]
# One linear's adapters: A [slots + 1, k, rank] and B [slots + 1, rank, n]; -1 finds zeros.
Stack = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[int], Tensors]  # makes one of the calls; returns every linear's output [m, n]


@dataclass(frozen=True)
class GroupCell:
    """What is called: a group of linears, rows, rank, and which adapters the rows take."""

    group: str
    m: int
    rank: int
    mix: str = ONE_ADAPTER  # or one of `row_mixes.MIXES`

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.group} m{self.m} r{self.rank} {self.mix}"

    @property
    def has_slots(self) -> bool:
        """Whether each row has an adapter of its own."""
        return self.mix != ONE_ADAPTER

    @property
    def has_addend(self) -> bool:
        """Whether the builder's node adds to the residual; it returns deltas otherwise."""
        return self.group in ("o", "down")


class GroupCalls:
    """Calls with adapters of their own each, which a replay does not find in the cache."""

    def __init__(
        self, device: CudaDevice, cell: GroupCell, linears: Sequence[LinearShape], calls: int
    ) -> None:
        """Make the tensors; the rows take the slots of the cell's mix.

        Args:
            device: where the calls run.
            cell: their sizes.
            linears: of the group.
            calls: how many, one after another.
        """
        self._device, self._cell = device, cell
        slots = SLOTS if cell.has_slots else 1
        self._stacks = [
            [_random_stack(device, linear, cell.rank, slots) for linear in linears]
            for _ in range(calls)
        ]
        self._x = device.random(cell.m, linears[0].k)
        self._widths = [linear.n for linear in linears]
        self._y = device.random(cell.m, sum(self._widths))
        self._sum = self._y.clone()  # what cuBLAS adds to
        self._ys = [part.contiguous() for part in self._parts(self._y)]
        self._outs = [device.empty(cell.m, n) for n in self._widths]
        taken = mix(cell.mix, cell.m, SLOTS) if cell.has_slots else [0] * cell.m
        self.slot = torch.tensor(taken, dtype=torch.int32, device=device.where)  # [m], live
        self._ranks = torch.full(
            (slots, len(linears)), cell.rank, dtype=torch.int32, device=device.where
        )
        self.shape = self._shape_of(linears)
        size = workspace_bytes(self.shape) // 4
        self._workspace = device.empty(size, dtype=torch.float32)

    @property
    def x(self) -> torch.Tensor:
        """What all calls read [m, k]."""
        return self._x

    def __len__(self) -> int:
        """The number of calls."""
        return len(self._stacks)

    @property
    def methods(self) -> Mapping[str, Call]:
        """Ours first; where rows have adapters of their own, also ours where all share one.

        Else, where the GPU can, also ours that begins before the kernel before it has ended.
        """
        if self._cell.has_slots:
            return {"ours": self._ours, "cublas": self._gathered, "one_adapter": self._one_adapter}
        early = {"early": self._early} if can_be_early(self.shape, self._device.chip) else {}
        return {"ours": self._one_adapter, "cublas": self._addmm, **early}

    @property
    def ours(self) -> Call:
        """The first of `methods`."""
        return self._ours if self._cell.has_slots else self._one_adapter

    @property
    def slots(self) -> int:
        """Slots that the rows take; 1 where all share an adapter."""
        return len(set(self.slot.tolist()))

    def run_of(self, method: Callable[[int], object]) -> Callable[[], None]:
        """Return what makes all calls by a method."""

        def run() -> None:
            for index in range(len(self)):
                method(index)

        return run

    def worst_row(self, method: Call, slots: torch.Tensor | None = None) -> float:
        """Return the largest difference from float64 of a row, by the last call.

        Args:
            method: `one_adapter` takes the adapter of the first slot for all rows.
            slots: that the rows [m] should take; what they take by default.
        """
        for out in self._outs:
            out.fill_(float("nan"))
        self._sum.copy_(self._y)
        self._device.synchronize()
        found = method(len(self) - 1)
        self._device.synchronize()
        adds = self._cell.has_addend or method in (self._addmm, self._gathered)
        wanted = self.slot if slots is None else slots
        if method == self._one_adapter:
            wanted = torch.zeros_like(wanted)
        return worst_row(found, self._exact(wanted, adds=adds))

    def empty(self, index: int) -> Tensors:
        """As many CTAs as ours, which return at once; no method, for it computes nothing."""
        return self._launch(self.shape, self._stacks[index], self._rows, self._device.launch_empty)

    def _ours(self, index: int) -> Tensors:
        return self._launch(self.shape, self._stacks[index], self._rows, self._device.launch)

    def _one_adapter(self, index: int) -> Tensors:
        return self._of_first_slot(index, self._device.launch)

    def _early(self, index: int) -> Tensors:
        return self._of_first_slot(index, self._device.launch_early)

    def _of_first_slot(self, index: int, launch: LaunchCall) -> Tensors:
        factors = [(a[0], b[0]) for a, b in self._stacks[index]]
        return self._launch(replace(self.shape, stacks=None), factors, (), launch)

    @property
    def _rows(self) -> tuple[int, ...]:
        """The addresses of every row's slot, and of the slots' ranks."""
        return self.slot.data_ptr(), self._ranks.data_ptr()

    def _addmm(self, index: int) -> Tensors:
        """Two products a linear, the second of which adds to the output: torch's shortest."""
        parts = self._parts(self._sum)
        for (a, b), part in zip(self._stacks[index], parts, strict=True):
            part.addmm_(torch.mm(self._x, a[0]), b[0])
        return parts

    def _gathered(self, index: int) -> Tensors:
        """The same in batches, with A and B of each row gathered first."""
        parts = self._parts(self._sum)
        rows = self.slot % (SLOTS + 1)
        for (a, b), part in zip(self._stacks[index], parts, strict=True):
            t = torch.bmm(self._x[:, None], a.index_select(0, rows))
            part[:, None].baddbmm_(t, b.index_select(0, rows))
        return parts

    def _launch(
        self,
        shape: GroupShape,
        factors: Sequence[Stack],
        rows: tuple[int, ...],
        launch: LaunchCall,
    ) -> Tensors:
        buffers = GroupBuffers(
            self._x.data_ptr(),
            tuple(a.data_ptr() for a, _ in factors),
            tuple(b.data_ptr() for _, b in factors),
            tuple(y.data_ptr() for y in self._ys) if shape.has_addend else (),
            tuple(out.data_ptr() for out in self._outs),
            self._workspace.data_ptr(),
            *rows,
        )
        launch(shape, buffers, self._device.stream())
        return self._outs

    def _shape_of(self, linears: Sequence[LinearShape]) -> GroupShape:
        cell, dtype = self._cell, str(self._device.dtype).removeprefix("torch.")
        sites = tuple(SiteShape(linear.n, cell.rank) for linear in linears)
        stacks = StackShape(SLOTS, len(sites), tuple(range(len(sites))))
        of_rows = stacks if cell.has_slots else None
        return GroupShape(cell.m, linears[0].k, sites, dtype, cell.has_addend, of_rows)

    def _parts(self, y: torch.Tensor) -> list[torch.Tensor]:
        """Every linear's columns of y; nothing is copied."""
        ends = itertools.accumulate(self._widths, initial=0)
        return [y[:, start:end] for start, end in itertools.pairwise(ends)]

    def _exact(self, slots: torch.Tensor, *, adds: bool) -> Tensors:
        """The last call in float64, rows of one adapter at a time, by plain products."""
        x, exact = self._x.double(), []
        for (a, b), y in zip(self._stacks[-1], self._ys, strict=True):
            exact.append(y.double() if adds else torch.zeros_like(y, dtype=torch.float64))
            for slot in range(len(a) - 1):
                own = slots == slot
                exact[-1][own] += x[own] @ a[slot].double() @ b[slot].double()
        return exact


def worst_row(outs: Tensors, exact: Tensors) -> float:
    """Return the largest ||out - exact|| / ||exact|| of a row; NaN if one holds a NaN.

    A row that should be zeros counts with its norm.
    """
    rows = []
    for out, each in zip(outs, exact, strict=True):
        error, size = (out.double() - each).norm(dim=1), each.norm(dim=1)
        rows.append(torch.where(size > 0, error / size, error))
    return float(torch.cat(rows).max())


def _random_stack(device: CudaDevice, linear: LinearShape, rank: int, slots: int) -> Stack:
    """Adapters whose deltas are about half as large as what they are added to."""
    a = device.random(slots + 1, linear.k, rank, scale=linear.k**-0.5)
    b = device.random(slots + 1, rank, linear.n, scale=0.5 * rank**-0.5)
    a[-1], b[-1] = 0, 0
    return a, b
