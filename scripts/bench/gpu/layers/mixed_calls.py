"""Calls of one group whose rows take adapters of their own, and what every row should be."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from trt_lora.plugins.contract.slots import BASE_SLOT
from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape, StackShape
from trt_lora.scripts.bench.gpu.device import Device
from trt_lora.scripts.bench.gpu.elementwise_kernels import Tensors
from trt_lora.scripts.bench.gpu.layers.lora_methods import GroupCall, LoraMethod, adds_to_residual
from trt_lora.scripts.bench.gpu.layers.random_adapters import (
    Factors,
    RowTensors,
    random_stacks,
)
from trt_lora.scripts.bench.gpu.model_shapes import LinearShape

SLOTS = 8


def mixed_shape(
    group: str, linears: Sequence[LinearShape], m: int, rank: int, dtype: str
) -> GroupShape:
    """Return the shapes of a call for m rows that take `SLOTS` adapters of one rank."""
    sites = tuple(SiteShape(linear.n, rank) for linear in linears)
    stacks = StackShape(SLOTS, len(sites), tuple(range(len(sites))))
    return GroupShape(m, linears[0].k, sites, dtype, adds_to_residual(group), stacks)


class MixedCalls:
    """Calls with stacks of their own each; the rows of all take the slots that were set last."""

    def __init__(
        self,
        device: Device,
        group: str,
        linears: Sequence[LinearShape],
        m: int,
        rank: int,
        calls: int,
    ) -> None:
        """Make the tensors; all rows take the base model.

        Args:
            device: where the calls run.
            group: what the model calls it, which says whether it adds to the residual.
            linears: of the group.
            m: rows.
            rank: of every adapter.
            calls: so many, one after another.
        """
        self._device, self._group, self._linears = device, group, linears
        self.stacks = random_stacks(device, {group: tuple(linears)}, rank, calls, SLOTS)
        self._x = device.random(m, linears[0].k)
        self._ys = [device.random(m, linear.n) for linear in linears]
        self._outs = [device.empty(m, linear.n) for linear in linears]
        self._addends = self._ys if adds_to_residual(group) else []
        self._sum = torch.cat(self._ys, dim=1)  # of all linears: other methods add to it
        shape = mixed_shape(group, linears, m, rank, str(device.dtype).removeprefix("torch."))
        self._mixed = GroupCall(device, shape)
        self._single = GroupCall(device, replace(shape, stacks=None))
        slot = torch.full((m,), BASE_SLOT, dtype=torch.int32, device=device.where)
        ranks = torch.full((SLOTS, len(linears)), rank, dtype=torch.int32, device=device.where)
        self._rows = RowTensors(slot, ranks)

    @property
    def slot(self) -> torch.Tensor:
        """The slot of each row [m], int32; every run reads it, also one that was captured."""
        return self._rows.slot

    def run(self) -> None:
        """Enqueue our kernels, each row with its own adapter."""
        for layer in self.stacks:
            stacks = layer[self._group]
            self._mixed.launch(self._x, stacks, self._addends, self._outs, self._rows)

    def run_one_adapter(self) -> None:
        """Enqueue our kernels for one adapter: all rows take that of the first slot."""
        for layer in self.stacks:
            factors = [Factors(stack.a[0], stack.b[0]) for stack in layer[self._group]]
            self._single.launch(self._x, factors, self._addends, self._outs)

    def run_of(self, add: LoraMethod) -> Callable[[], None]:
        """Return what enqueues another method for all calls."""

        def run() -> None:
            for index in range(len(self.stacks)):
                add(index, self._group, self._x, self._sum)

        return run

    def worst_row_after(self, run: Callable[[], object], rows: torch.Tensor) -> float:
        """Return the worst difference from float64 of a row that the last call of `run` writes.

        Args:
            run: runs our kernels.
            rows: the slot that each row [m] should take; what `slot` holds is not asked.
        """
        for out in self._outs:
            out.fill_(float("nan"))
        self._device.synchronize()
        run()
        self._device.synchronize()
        return worst_row(self._outs, self._exact(self._addends, rows))

    def worst_row_of(self, add: LoraMethod, rows: torch.Tensor) -> float:
        """Return the same of another method, by its last call."""
        before = torch.cat(self._ys, dim=1)
        found = add(len(self.stacks) - 1, self._group, self._x, before.clone())
        self._device.synchronize()
        return worst_row(found, self._exact(self._ys, rows))

    def _exact(self, ys: Tensors, rows: torch.Tensor) -> list[torch.Tensor]:
        """The last call in float64, rows of one adapter at a time, by plain products."""
        x, exact = self._x.double(), []
        taken = rows.to(self._device.where)
        for index, stack in enumerate(self.stacks[-1][self._group]):
            y = ys[index] if ys else torch.zeros_like(self._ys[index])
            exact.append(y.double())
            for slot in range(SLOTS):
                own = taken == slot
                exact[-1][own] += x[own] @ stack.a[slot].double() @ stack.b[slot].double()
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
