"""One group of linears at a time, in a graph of calls with an adapter each."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trt_lora.plugins.kernels.group_call import GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import plan_launches
from trt_lora.scripts.bench.gpu.layers.lora_methods import (
    GroupCall,
    LoraMethod,
    addmm,
    adds_to_residual,
    pair_add,
    shape_of,
)
from trt_lora.scripts.bench.gpu.layers.peer_methods import vllm
from trt_lora.scripts.bench.gpu.layers.random_adapters import random_adapter, transposed
from trt_lora.scripts.bench.gpu.model_shapes import LinearShape
from trt_lora.scripts.bench.gpu.report import Expectation, Expectations, ResultRow
from trt_lora.scripts.bench.gpu.roofline import (
    ITEM_BYTES,
    LATENCY_US,
    LAUNCH_COSTS,
    LAUNCH_US,
    group_us,
)
from trt_lora.scripts.bench.gpu.session import Bench, Options, difference

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
RANKS = (8, 32, 64, 128, 256)
PREFILL = 512  # rows from which parity with addmm_ is the target
_LEAST_CALLS, _MOST_CALLS = 32, 512


@dataclass(frozen=True)
class GroupCell:
    """One row of the workload."""

    group: str
    m: int
    rank: int

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.group} m{self.m} r{self.rank}"


def cells() -> Iterator[GroupCell]:
    """Yield what matters most first: a deadline cuts the end."""
    groups = ("gate_up", "qkv", "down", "o")
    first = [(m, 16) for m in (1, 8, 32, 512)]
    second = [(m, rank) for rank in (64, 256, 8, 128, 32) for m in (1, 8, 32, 512)]
    rest = [(m, 16) for m in ROWS if (m, 16) not in first]
    for sizes in (first, rest, second):
        for (m, rank), group in itertools.product(sizes, groups):
            yield GroupCell(group, m, rank)


def expectations(options: Options) -> Expectations:
    """Return launch and bytes for every cell; parity with addmm_ is the target of prefill."""
    return {cell.name: _expected(cell, options) for cell in cells()}


def rows(bench: Bench) -> Iterator[ResultRow]:
    """Measure every cell."""
    for cell in cells():
        yield measure(bench, cell)


def _expected(cell: GroupCell, options: Options) -> dict[str, Expectation]:
    linears = options.model.groups[cell.group]
    sites = tuple(SiteShape(linear.n, cell.rank) for linear in linears)
    shape = GroupShape(cell.m, linears[0].k, sites, "float16", adds_to_residual(cell.group))
    launches = len(plan_launches(shape, options.chip))
    moved = group_us(linears, cell.m, cell.rank, LAUNCH_COSTS["ours"])
    low, high = (launches * each + moved for each in (LAUNCH_US[0], LATENCY_US))
    expected = {
        "ours, us a call": Expectation(low, high),
        "ours / addmm_, difference": Expectation(at_most=0.01),
    }
    if cell.m >= PREFILL:
        expected["addmm / ours"] = Expectation(at_least=1.0)
    return expected


def measure(bench: Bench, cell: GroupCell) -> ResultRow:
    """Time one cell, ours beside the others."""
    linears = bench.options.model.groups[cell.group]
    calls = _calls(linears, cell, bench.options.l2_bytes)
    methods = _GroupMethods(bench, cell, calls)
    replays = {name: bench.device.capture(run) for name, run in methods.versions().items()}
    notes: dict[str, Any] = {}
    try:
        replays["vllm"] = bench.device.capture(methods.vllm())
    except Exception as error:  # Triton raises what it likes; the other columns stand
        notes["vllm"] = f"left out: {error!r:.500}"
    times = bench.time(replays)
    us = {name: times.median(name) / calls for name in replays}
    bound = group_us(linears, cell.m, cell.rank, LAUNCH_COSTS["ours"])
    others = [name for name in replays if name != "ours"]
    return ResultRow(
        cell.name,
        {"group": cell.group, "m": cell.m, "rank": cell.rank, "calls": calls},
        {f"{name}_us": value for name, value in us.items()},
        {"ours, us a call": us["ours"], "% of roofline": 100 * bound / us["ours"]}
        | {f"{name} / ours": times.ratio(name, "ours") for name in others}
        | {"ours / addmm_, difference": methods.difference()},
        {"nodes": {name: replay.nodes for name, replay in replays.items()}} | notes,
    )


def _calls(linears: Sequence[LinearShape], cell: GroupCell, l2_bytes: int) -> int:
    if cell.m >= PREFILL:
        return _LEAST_CALLS  # x and y drive them out
    return calls_beyond_cache(linears, cell.rank, l2_bytes)


def calls_beyond_cache(linears: Sequence[LinearShape], rank: int, l2_bytes: int) -> int:
    """Return how many calls have adapters that do not stay in the level-2 cache until a replay.

    Args:
        linears: of the group.
        rank: of the adapters, of which each call has one of its own.
        l2_bytes: of the cache.
    """
    one = ITEM_BYTES * rank * sum(linear.k + linear.n for linear in linears)
    return max(_LEAST_CALLS, min(_MOST_CALLS, -(-3 * l2_bytes // one)))


class _GroupMethods:
    """One cell's tensors, and every version as what a graph captures."""

    def __init__(self, bench: Bench, cell: GroupCell, calls: int) -> None:
        self._bench, self._cell, self._calls = bench, cell, calls
        device, self._linears = bench.device, bench.options.model.groups[cell.group]
        groups = {cell.group: self._linears}
        self._adapter = random_adapter(device, groups, cell.rank, calls)
        self._x = device.random(cell.m, self._linears[0].k)
        self._y = device.random(cell.m, sum(linear.n for linear in self._linears))
        self._ys = [device.random(cell.m, linear.n) for linear in self._linears]
        self._outs = [device.empty(cell.m, linear.n) for linear in self._linears]
        has_addend = adds_to_residual(cell.group)
        shape = shape_of(self._adapter[0][cell.group], cell.m, device.dtype, has_addend=has_addend)
        self._call = GroupCall(device, shape)
        self._addends = self._ys if has_addend else []

    def versions(self) -> dict[str, Callable[[], None]]:
        return {
            "ours": self._run_ours,
            "addmm": self._run(addmm(self._adapter)),
            "pair_add": self._run(pair_add(self._adapter)),
        }

    def vllm(self) -> Callable[[], None]:
        operators = self._bench.vllm()
        groups, device = {self._cell.group: self._linears}, self._bench.device
        adapter = transposed(self._adapter)
        return self._run(vllm(device, groups, adapter, operators, self._cell.m))

    def difference(self) -> float:
        """Return the difference between one call of ours and torch's result."""
        first = self._adapter[0][self._cell.group]
        self._call.launch(self._x, first, self._addends, self._outs)
        y = torch.cat(self._addends, dim=1) if self._addends else torch.zeros_like(self._y)
        theirs = addmm(self._adapter)(0, self._cell.group, self._x, y)
        self._bench.device.synchronize()
        return difference(self._outs, theirs)

    def _run_ours(self) -> None:
        for layer in self._adapter:
            self._call.launch(self._x, layer[self._cell.group], self._addends, self._outs)

    def _run(self, add: LoraMethod) -> Callable[[], None]:
        def run() -> None:
            for index in range(self._calls):
                add(index, self._cell.group, self._x, self._y)

        return run
