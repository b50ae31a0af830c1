"""One group of linears whose rows take adapters of their own, in a graph of calls."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from trt_lora.plugins.contract.slots import BASE_SLOT
from trt_lora.plugins.kernels.passes import launches_of
from trt_lora.scripts.bench.gpu.device import Replay
from trt_lora.scripts.bench.gpu.layers.lora_methods import (
    LoraMethod,
    adds_to_residual,
    gathered,
)
from trt_lora.scripts.bench.gpu.layers.mixed_calls import SLOTS, MixedCalls, mixed_shape
from trt_lora.scripts.bench.gpu.layers.peer_methods import vllm_by_rows
from trt_lora.scripts.bench.gpu.layers.random_adapters import transposed_stacks
from trt_lora.scripts.bench.gpu.layers.row_mixes import MIXES, mix
from trt_lora.scripts.bench.gpu.report import Expectation, Expectations, ResultRow
from trt_lora.scripts.bench.gpu.roofline import (
    LATENCY_US,
    LAUNCH_COSTS,
    LAUNCH_US,
    adapters_us,
    group_us,
)
from trt_lora.scripts.bench.gpu.session import Bench, Options
from trt_lora.scripts.bench.gpu.workloads.lora_group import calls_beyond_cache
from trt_lora.scripts.measuring.turns import Spread, Times

ROWS = (8, 32, 64, 1)
RANKS = (64, 16)  # most bytes to move first
AGREES = 0.01  # the difference that rounding explains in a row
_PERCENT = 80.0  # of what the bytes of the adapters allow, at least
_OF_BOUND, _WITHOUT_LAUNCHES = "% of the adapters' byte bound", "% of it without launches"
_OURS = ("ours", "one_adapter", "nothing")
_OF_ONE_ROW = ("identical", "all base")  # the others are one of them


@dataclass(frozen=True)
class MixedCell:
    """One row of the workload."""

    group: str
    m: int
    rank: int
    mix: str

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.group} m{self.m} r{self.rank} {self.mix}"

    @property
    def rows(self) -> list[int]:
        """The slot of each row."""
        found: list[int] = mix(self.mix, self.m, SLOTS).tolist()
        return found

    @property
    def adapters(self) -> int:
        """How many adapters the rows take."""
        return len({*self.rows} - {BASE_SLOT})


def cells() -> Iterator[MixedCell]:
    """Yield what matters most first: a deadline cuts the end."""
    groups = ("gate_up", "qkv", "down", "o")
    for m, rank, group in itertools.product(ROWS, RANKS, groups):
        for name in MIXES if m > 1 else _OF_ONE_ROW:
            yield MixedCell(group, m, rank, name)


def expectations(options: Options) -> Expectations:
    """Return launches and bytes for every cell; the target is a part of what the bytes allow."""
    return {cell.name: _expected(cell, options) for cell in cells()}


def rows(bench: Bench) -> Iterator[ResultRow]:
    """Measure every cell."""
    for cell in cells():
        yield measure(bench, cell)


def predicted_us(cell: MixedCell, options: Options, adapters: int) -> tuple[float, float]:
    """Return what a call of ours takes whose rows have so many adapters: at least, and at most."""
    linears = options.model.groups[cell.group]
    passes = 2 if adds_to_residual(cell.group) else 1  # a delta is written and read by nobody here
    cost = replace(LAUNCH_COSTS["ours"], passes_over_y=passes)
    moved = group_us(linears, cell.m, cell.rank, cost, adapters)
    launches = _launches(cell, options)
    return launches * LAUNCH_US[0] + moved, launches * LATENCY_US + moved


def _launches(cell: MixedCell, options: Options) -> int:
    """Those of one call of ours."""
    linears = options.model.groups[cell.group]
    shape = mixed_shape(cell.group, linears, cell.m, cell.rank, "float16")
    return len(launches_of(shape, options.chip))


def _expected(cell: MixedCell, options: Options) -> dict[str, Expectation]:
    low, high = predicted_us(cell, options, cell.adapters)
    one = predicted_us(cell, options, 1)
    by_one = sorted((low / one[0], high / one[1]))
    agreement = Expectation(at_most=AGREES)
    expected = {
        "ours, us a call": Expectation(low, high),
        "ours / one_adapter": Expectation(*by_one),
        **{_difference(name): agreement for name in ("ours", "bmm", "vllm")},
    }
    if not cell.adapters:  # no bytes, and vLLM launches nothing
        return expected
    bound = adapters_us(options.model.groups[cell.group], cell.rank, cell.adapters)
    percent = Expectation(100 * bound / high, 100 * bound / low, at_least=_PERCENT)
    return expected | {
        _OF_BOUND: percent,
        "vllm / ours": Expectation(at_least=1.0),
    }


def measure(bench: Bench, cell: MixedCell) -> ResultRow:
    """Time one cell, ours beside ours for one adapter and the others."""
    timing = _MixedTiming(bench, cell)
    calls = timing.calls
    timing.add("ours", calls.run, calls.worst_row_after(calls.run, timing.rows))
    timing.add("one_adapter", calls.run_one_adapter)
    timing.add("nothing", timing.run_nothing)
    timing.attempt("bmm", lambda: gathered(calls.stacks, calls.slot))
    timing.attempt("vllm", timing.vllm)
    return timing.row()


class _MixedTiming:
    """The methods of one cell, each a graph; a peer that fails costs its own column alone."""

    def __init__(self, bench: Bench, cell: MixedCell) -> None:
        self._bench, self._cell = bench, cell
        self._linears = bench.options.model.groups[cell.group]
        calls = calls_beyond_cache(self._linears, cell.rank, bench.options.l2_bytes)
        self.calls = MixedCalls(bench.device, cell.group, self._linears, cell.m, cell.rank, calls)
        self.rows = torch.tensor(cell.rows)
        self.calls.slot.copy_(self.rows)
        self._replays: dict[str, Replay] = {}
        self._differences: dict[str, Spread | float] = {}
        self._left_out: dict[str, str] = {}

    def add(self, name: str, run: Callable[[], None], worst: float | None = None) -> None:
        self._replays[name] = self._bench.device.capture(run)
        if worst is not None:
            self._differences[_difference(name)] = worst

    def attempt(self, name: str, make: Callable[[], LoraMethod]) -> None:
        try:
            method = make()
            worst = self.calls.worst_row_of(method, self.rows)
            self.add(name, self.calls.run_of(method), worst)
        except Exception as error:  # Triton raises what it likes, and gathering takes memory
            self._left_out[name] = f"left out: {error!r:.500}"

    def run_nothing(self) -> None:
        """As many kernels as ours are, which do nothing: what the launches alone take."""
        for _ in range(len(self.calls.stacks) * _launches(self._cell, self._bench.options)):
            self._bench.device.elementwise.nothing()

    def vllm(self) -> LoraMethod:
        operators, stacks = self._bench.vllm(), transposed_stacks(self.calls.stacks)
        groups = {self._cell.group: self._linears}
        return vllm_by_rows(self._bench.device, groups, stacks, operators, self._cell.rows)

    def row(self) -> ResultRow:
        cell, times = self._cell, self._bench.time(self._replays)
        calls = len(self.calls.stacks)
        us = {name: times.median(name) / calls for name in self._replays}
        sizes = {"group": cell.group, "m": cell.m, "rank": cell.rank, "mix": cell.mix}
        nodes: dict[str, Any] = {name: replay.nodes for name, replay in self._replays.items()}
        return ResultRow(
            cell.name,
            sizes | {"slots": SLOTS, "adapters": cell.adapters, "calls": calls},
            {f"{name}_us": value for name, value in us.items()},
            {"ours, us a call": us["ours"]} | self._ratios(times, us) | self._differences,
            {"rows": cell.rows, "nodes": nodes} | self._left_out,
        )

    def _ratios(self, times: Times, us: Mapping[str, float]) -> dict[str, Spread | float]:
        peers = [name for name in self._replays if name not in _OURS]
        ratios: dict[str, Spread | float] = {
            "ours / one_adapter": times.ratio("ours", "one_adapter")
        }
        ratios |= {f"{name} / ours": times.ratio(name, "ours") for name in peers}
        if self._cell.adapters:
            bound = adapters_us(self._linears, self._cell.rank, self._cell.adapters)
            ratios[_OF_BOUND] = 100 * bound / us["ours"]
            if (rest := us["ours"] - us["nothing"]) > 0:
                ratios[_WITHOUT_LAUNCHES] = 100 * bound / rest
        return ratios


def _difference(method: str) -> str:
    return f"{method} / float64, worst row"
