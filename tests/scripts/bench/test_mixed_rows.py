"""The GPU benchmark's rows with adapters of their own, on a CPU: tiny sizes, emulated kernels."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels import emulator
from support.fakes.cpu_device import TINY, CpuDevice, CpuReplay

from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape
from trt_lora.scripts.bench.gpu.layers.mixed_calls import SLOTS, MixedCalls, worst_row
from trt_lora.scripts.bench.gpu.layers.row_mixes import MIXES, mix
from trt_lora.scripts.bench.gpu.layers.vllm_kernels import load_vllm
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B
from trt_lora.scripts.bench.gpu.report import ResultRow
from trt_lora.scripts.bench.gpu.roofline import BYTES_PER_US, adapters_us
from trt_lora.scripts.bench.gpu.session import Bench, Options
from trt_lora.scripts.bench.gpu.workloads import lora_group, mixed_rows, slot_switch
from trt_lora.scripts.bench.gpu.workloads.mixed_rows import MixedCell

needs_compiler = pytest.mark.skipif(emulator.compiler() is None, reason="there is no g++")

CALLS = 2


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_group, "_LEAST_CALLS", CALLS)
    monkeypatch.setattr(lora_group, "_MOST_CALLS", CALLS)


def bench_on(device: CpuDevice, vllm: Path | None = None) -> Bench:
    return Bench(device, Options(rounds=1, warm_up=0, model=TINY, l2_bytes=1, vllm=vllm))


def worst(row: ResultRow, method: str = "ours") -> float:
    """The difference that a row of the report says."""
    found = row.ratios[f"{method} / float64, worst row"]
    assert isinstance(found, float)
    return found


# ---- mixes


def test_a_mix_gives_rows_what_its_name_says() -> None:
    assert len(set(mix("identical", 8, SLOTS))) == 1
    for rows in (8, 32, 64):
        assert np.bincount(mix("distinct", rows, SLOTS)).tolist() == [rows // SLOTS] * SLOTS
    assert set(mix("all base", 8, SLOTS)) == {-1}
    assert sorted(mix("one base row among many", 8, SLOTS)).count(-1) == 1
    many = np.bincount(mix("Zipf", 10_000, SLOTS))
    assert many / many[0] == pytest.approx(1 / np.arange(1, SLOTS + 1), abs=0.03)
    for name in MIXES:
        assert set(mix(name, 64, SLOTS)) <= set(range(-1, SLOTS))
        assert mix(name, 64, SLOTS).tolist() == mix(name, 64, SLOTS).tolist()


# ---- the rows


@needs_compiler
@pytest.mark.parametrize("name", MIXES)
def test_every_method_gives_each_row_its_adapter(name: str, vllm_folder: Path) -> None:
    row = mixed_rows.measure(bench_on(CpuDevice(), vllm_folder), MixedCell("qkv", 8, 16, name))
    for method in ("ours", "bmm", "vllm"):
        assert worst(row, method) < 2e-3, method
    expected = mixed_rows.expectations(Options())[f"qkv m8 r16 {name}"]
    assert set(expected) <= set(row.ratios), "a prediction that no result stands beside"
    assert row.sizes["adapters"] == len(set(row.notes["rows"]) - {-1})
    assert row.sizes["calls"] == CALLS


@needs_compiler
@pytest.mark.parametrize("group", ["gate_up", "o"])
def test_rows_of_the_base_model_keep_every_bit(group: str) -> None:
    row = mixed_rows.measure(bench_on(CpuDevice()), MixedCell(group, 1, 16, "all base"))
    assert worst(row) == worst(row, "bmm") == 0.0
    assert "% of the adapters' byte bound" not in row.ratios
    assert "left out" in row.notes["vllm"]


@needs_compiler
def test_ours_is_timed_as_one_call_with_stacks_and_one_without() -> None:
    device = CpuDevice()
    mixed_rows.measure(bench_on(device), MixedCell("down", 8, 64, "uniform"))
    shapes = {(s.stacks.slots if s.stacks else None, s.has_addend) for s in device.kernels.shapes}
    assert shapes == {(SLOTS, True), (None, True)}


@needs_compiler
def test_launches_are_told_from_bytes_by_as_many_kernels_that_do_nothing() -> None:
    device = CpuDevice()
    row = mixed_rows.measure(bench_on(device), MixedCell("qkv", 8, 64, "distinct"))
    launches = 2  # rank 64 of three linears takes two: what lies between them goes through memory
    assert device.elementwise.nodes == 2 * CALLS * launches  # once to capture, once to time
    both = [row.ratios["% of the adapters' byte bound"], row.ratios["% of it without launches"]]
    assert both == pytest.approx(
        [
            100 * adapters_us(TINY.groups["qkv"], 64, 8) / us
            for us in (
                row.variants["ours_us"],
                row.variants["ours_us"] - row.variants["nothing_us"],
            )
        ]
    )


@needs_compiler
def test_a_row_with_anothers_adapter_is_found() -> None:
    device = CpuDevice()
    calls = MixedCalls(device, "qkv", TINY.groups["qkv"], 8, 16, CALLS)
    wanted = torch.arange(8)
    calls.slot.copy_(wanted)
    assert calls.worst_row_after(calls.run, wanted) < 2e-3
    calls.slot[5] = 4
    assert calls.worst_row_after(calls.run, wanted) > 0.5


def test_the_worst_row_is_not_lost_among_others() -> None:
    exact = torch.ones(64, 16, dtype=torch.float64)
    exact[7] = 0
    out = exact.clone()
    assert worst_row([out], [exact]) == 0.0
    out[3, 0] += 1
    assert worst_row([exact, out], [exact, exact]) == pytest.approx(0.25)
    out[7, 0] = 2  # a row that should be zeros
    assert worst_row([out], [exact]) == pytest.approx(2.0)
    out[9, 3] = float("nan")
    assert np.isnan(worst_row([out, exact], [exact, exact]))


# ---- vLLM's mapping


def test_vllm_is_told_which_rows_take_which_adapter(vllm_folder: Path) -> None:
    routes = load_vllm(vllm_folder).route([2, -1, 0, 2], 3, torch.device("cpu"))
    assert {name: value.tolist() for name, value in routes.items()} == {
        "token_lora_mapping": [2, -1, 0, 2],
        "token_indices_sorted_by_lora_ids": [1, 2, 0, 3],
        "num_tokens_per_lora": [1, 1, 2, 0],
        "lora_token_start_loc": [0, 1, 2, 4, 4],
        "lora_ids": [-1, 0, 2, -1],
        "no_lora_flag_cpu": [False],
        "num_active_loras": [3],
    }
    base = load_vllm(vllm_folder).route([-1, -1], 3, torch.device("cpu"))
    assert base["no_lora_flag_cpu"].item() is True


# ---- what is expected


def test_cells_are_every_group_rank_and_mix_most_valuable_first() -> None:
    names = [cell.name for cell in mixed_rows.cells()]
    assert len(names) == len(set(names)) == 4 * 2 * (2 + 3 * len(MIXES))
    assert names[0] == "gate_up m8 r64 identical"
    assert names[-1] == "o m1 r16 all base"


def test_the_bound_is_the_bytes_of_the_adapters_that_rows_take() -> None:
    gate_up = LLAMA_3_8B.groups["gate_up"]
    one = 2 * 64 * 2 * (4096 + 14336)  # two linears, two bytes
    assert adapters_us(gate_up, 64, 8) == pytest.approx(8 * one / BYTES_PER_US)
    assert MixedCell("gate_up", 64, 64, "distinct").adapters == 8
    assert MixedCell("gate_up", 64, 64, "one base row among many").adapters == 2
    assert MixedCell("gate_up", 64, 64, "all base").adapters == 0


@pytest.mark.parametrize(
    ("group", "m", "rank", "name", "low", "high"),
    [
        ("gate_up", 8, 64, "distinct", 68, 84),
        ("gate_up", 64, 64, "distinct", 64, 78),
        ("down", 8, 64, "distinct", 52, 74),
        ("qkv", 8, 64, "distinct", 35, 59),
        ("o", 8, 64, "distinct", 32, 56),
        ("gate_up", 8, 64, "identical", 21, 40),
        ("gate_up", 8, 16, "distinct", 35, 58),
        ("o", 8, 16, "identical", 1, 4),
    ],
)
def test_parts_of_the_bound_are_those_of_the_page(
    group: str, m: int, rank: int, name: str, low: float, high: float
) -> None:
    cell = MixedCell(group, m, rank, name)
    found = mixed_rows.expectations(Options())[cell.name]["% of the adapters' byte bound"]
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.6)
    assert found.at_least == 80.0


def test_there_is_a_target_where_an_adapter_is_touched() -> None:
    expected = mixed_rows.expectations(Options())
    for cell in mixed_rows.cells():
        names = set(expected[cell.name])
        assert ({"% of the adapters' byte bound", "vllm / ours"} <= names) == bool(cell.adapters)


# ---- a slot's switch


class CountingDevice(CpuDevice):
    """Counts captures, and writes down where the kernels read the rows' slots."""

    def __init__(self) -> None:
        super().__init__()
        self.captures = 0
        self.slot_addresses: set[int] = set()
        kernels, launch = self.kernels, self.kernels.launch

        def noted(shape: GroupShape, buffers: GroupBuffers, stream: int) -> None:
            self.slot_addresses.add(buffers.slot)
            launch(shape, buffers, stream)

        kernels.launch = noted  # type: ignore[method-assign]

    def capture(self, run: Callable[[], object]) -> CpuReplay:
        """Run once."""
        self.captures += 1
        return super().capture(run)


@needs_compiler
@pytest.mark.parametrize("group", slot_switch.GROUPS)
def test_other_slots_take_no_capture_and_no_other_address(group: str) -> None:
    device = CountingDevice()
    row = slot_switch.measure(bench_on(device), group, 8)
    assert device.captures == 1
    assert len(device.slot_addresses) == 1
    assert row.ratios["captures for a change"] == 0
    assert worst(row) < 2e-3
    assert set(slot_switch.EXPECTATIONS[row.name]) == set(row.ratios)


@needs_compiler
def test_a_change_that_does_not_arrive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_switch.SlotChange, "run", lambda change: None)
    row = slot_switch.measure(bench_on(CpuDevice()), "o", 8)
    assert worst(row) > mixed_rows.AGREES


@needs_compiler
def test_a_row_that_is_never_written_is_not_lost_among_the_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = iter([1e-4, float("nan"), *[1e-4] * (len(MIXES) - 2)])
    monkeypatch.setattr(MixedCalls, "worst_row_after", lambda self, run, rows: next(found))
    row = slot_switch.measure(bench_on(CpuDevice()), "o", 8)
    assert np.isnan(worst(row))
