"""Rows of a captured graph whose slots change between two replays."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from trt_lora.scripts.bench.gpu.device import Replay
from trt_lora.scripts.bench.gpu.layers.mixed_calls import SLOTS, MixedCalls
from trt_lora.scripts.bench.gpu.layers.row_mixes import MIXES, mix
from trt_lora.scripts.bench.gpu.report import Expectation, Expectations, ResultRow
from trt_lora.scripts.bench.gpu.session import Bench
from trt_lora.scripts.bench.gpu.workloads.lora_group import calls_beyond_cache
from trt_lora.scripts.bench.gpu.workloads.mixed_rows import AGREES

ROWS, RANK = (8, 64), 16
GROUPS = ("gate_up", "o")  # one returns deltas, the other adds to the residual
_EXPECTED = {
    "a change, us of the host": Expectation(at_most=10.0),
    "a replay after it / the same again": Expectation(0.99, 1.01),
    "captures for a change": Expectation(at_most=0.0),
    "ours / float64, worst row": Expectation(at_most=AGREES),
}


def _name(group: str, m: int) -> str:
    return f"{group} m{m} r{RANK}"


EXPECTATIONS: Expectations = {_name(group, m): _EXPECTED for group in GROUPS for m in ROWS}


def rows(bench: Bench) -> Iterator[ResultRow]:
    """Measure a change of all rows' slots, by group and number of rows."""
    for group in GROUPS:
        for m in ROWS:
            yield measure(bench, group, m)


def measure(bench: Bench, group: str, m: int) -> ResultRow:
    """Capture once; give the rows the slots of every mix, and compare what each replay computes."""
    linears = bench.options.model.groups[group]
    count = calls_beyond_cache(linears, RANK, bench.options.l2_bytes)
    calls = MixedCalls(bench.device, group, linears, m, RANK, count)
    captured = [bench.device.capture(calls.run)]
    changes = [SlotChange.of(calls.slot, mix(name, m, SLOTS)) for name in MIXES]
    worst = np.max([_worst_row(calls, change, captured[0]) for change in changes])  # NaN stays
    host_us = statistics.median(
        _host_us(bench, change) for _ in range(bench.options.rounds) for change in changes
    )
    device_us, ratio = _between_replays(bench, calls.slot, captured[0])
    return ResultRow(
        _name(group, m),
        {"group": group, "m": m, "rank": RANK, "slots": SLOTS, "calls": count},
        {"a change, us of the device": device_us},
        {
            "a change, us of the host": host_us,
            "a replay after it / the same again": ratio,
            "captures for a change": (len(captured) - 1) / len(changes),
            "ours / float64, worst row": float(worst),
        },
        {"changes to": list(MIXES), "nodes": captured[0].nodes},
    )


@dataclass(frozen=True)
class SlotChange:
    """A copy of other slots to where a captured graph reads them."""

    slot: torch.Tensor  # of each row [m], on the device
    wanted: torch.Tensor  # on the host, pinned where there is a GPU: nobody waits for the copy
    nodes: int | None = None  # a replay's, as `Replay` has them

    @classmethod
    def of(cls, slot: torch.Tensor, rows: npt.NDArray[np.int32]) -> Self:
        """Return the change to the slots of `rows`."""
        wanted = torch.from_numpy(rows)
        return cls(slot, wanted.pin_memory() if slot.is_cuda else wanted)

    def run(self) -> None:
        """Enqueue the copy."""
        self.slot.copy_(self.wanted, non_blocking=True)


def _worst_row(calls: MixedCalls, change: SlotChange, graph: Replay) -> float:
    def run() -> None:
        change.run()
        graph.run()

    return calls.worst_row_after(run, change.wanted)


def _host_us(bench: Bench, change: SlotChange) -> float:
    start = time.perf_counter()
    change.run()
    stop = time.perf_counter()
    bench.device.synchronize()
    return 1e6 * (stop - start)


def _between_replays(bench: Bench, slot: torch.Tensor, graph: Replay) -> tuple[float, float]:
    """A change's time on the device, and a replay after it by one before: as many adapters each."""
    rows = mix("distinct", len(slot), SLOTS)
    changes = [SlotChange.of(slot, each) for each in (rows, rows[::-1].copy())]
    changes[1].run()
    copies, ratios = [], []
    for index in range(bench.options.rounds):
        change = changes[index % 2]
        _, same, copy, after = bench.device.times_us([graph, graph, change, graph])
        copies.append(copy)
        ratios.append(after / same)
    return statistics.median(copies), statistics.median(ratios)
