"""The kernels on a CPU: tiny sizes, emulated kernels, and the GPU's own calls recorded."""

import gc
from typing import Any

import numpy as np
import pytest
import torch
from kernels import emulator
from support.fakes.cpu_device import TINY, CpuDevice

from trt_lora.scripts.bench.gpu import device as gpu_device
from trt_lora.scripts.bench.gpu import kernels
from trt_lora.scripts.bench.gpu.group_calls import (
    ONE_ADAPTER,
    SLOTS,
    GroupCalls,
    GroupCell,
    worst_row,
)
from trt_lora.scripts.bench.gpu.path_model import GPUS
from trt_lora.scripts.bench.gpu.row_mixes import MIXES, mix
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.worker import WrongResultError

needs_compiler = pytest.mark.skipif(emulator.compiler() is None, reason="there is no g++")
CALLS = 2
H100 = GPUS["H100"]


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_LEAST_CALLS", CALLS)
    monkeypatch.setattr(kernels, "_MOST_CALLS", CALLS)
    monkeypatch.setattr(kernels, "WARM_UP", 0)


def worst(row: ResultRow, method: str = "ours") -> float:
    """The difference that a row says."""
    found = row.ratios[f"{method} / float64, worst row"]
    assert isinstance(found, float)
    return found


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


@needs_compiler
@pytest.mark.parametrize("name", [ONE_ADAPTER, *MIXES])
def test_every_method_gives_each_row_its_adapter(name: str) -> None:
    device = CpuDevice()
    row = kernels.measure(device, GroupCell("qkv", 8, 16, name), H100, TINY, rounds=1)
    assert {shape.stacks is None for shape in device.emptied} == {name == ONE_ADAPTER}
    methods = {"ours", "cublas", "early" if name == ONE_ADAPTER else "one_adapter"}
    timed = {variant.partition(", us a call")[0] for variant in row.variants}
    assert timed == {*methods, "empty", "ours without its launch, us", "predicted, us"}
    assert row.variants["predicted, us"] > 1
    for method in methods:
        assert worst(row, method) < 2e-3, method
    assert "cublas / ours" in row.ratios
    assert row.sizes["calls"] == CALLS
    kernels.check(row)


@needs_compiler
@pytest.mark.parametrize("group", ["gate_up", "o"])
def test_rows_of_the_base_model_keep_every_bit(group: str) -> None:
    row = kernels.measure(CpuDevice(), GroupCell(group, 1, 16, "all base"), H100, TINY, rounds=1)
    assert worst(row) == worst(row, "cublas") == 0.0


@needs_compiler
def test_ours_is_timed_in_the_forms_that_the_builder_inserts() -> None:
    device = CpuDevice()
    for group in TINY.groups:
        kernels.measure(device, GroupCell(group, 8, 16, "uniform"), H100, TINY, rounds=1)
    shapes = {
        (len(shape.sites), shape.has_addend, shape.stacks is not None)
        for shape in device.kernels.shapes
    }
    forms = {(3, False), (1, True), (2, False)}  # q k v; o and down; gate and up
    assert shapes == {(*form, has_slots) for form in forms for has_slots in (False, True)}


@needs_compiler
def test_a_row_with_anothers_adapter_is_found() -> None:
    calls = GroupCalls(CpuDevice(), GroupCell("qkv", 8, 16, "distinct"), TINY.groups["qkv"], CALLS)
    wanted = calls.slot.clone()
    assert calls.worst_row(calls.methods["ours"], wanted) < 2e-3
    calls.slot[5] = (wanted[5] + 1) % SLOTS
    assert calls.worst_row(calls.methods["ours"], wanted) > 0.5


def test_a_row_that_differs_or_is_never_written_is_a_wrong_result() -> None:
    for value in (2 * kernels.AGREES, float("nan")):
        with pytest.raises(WrongResultError, match="o m1: the worst row differs by"):
            kernels.check(ResultRow("o m1", ratios={"ours / float64, worst row": value}))


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


def test_cells_are_each_once_and_most_valuable_first() -> None:
    names = [cell.name for cell in kernels.cells()]
    assert len(names) == len(set(names))
    assert names[0] == "gate_up m1 r16 one adapter"
    assert names[16] == "gate_up m8 r64 identical"


# ---- the GPU's own calls, against a recorder


class Recorder:
    """Stands for torch.cuda: writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return self

        return called

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def recorded_device(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recorder]:
    """A CudaDevice that was never made."""
    cuda = Recorder()
    monkeypatch.setattr(gpu_device, "_CUDA", cuda)
    monkeypatch.setattr(gpu_device, "_count_nodes", lambda graph: 7)
    device: Any = gpu_device.CudaDevice.__new__(gpu_device.CudaDevice)
    vars(device).update(_stream=cuda, _second=cuda)
    return device, cuda


def test_a_capture_is_warmed_up_and_closed_whatever_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, cuda = recorded_device(monkeypatch)
    assert device.capture(lambda: cuda.calls.append("run")).nodes == 7
    assert [call for call in cuda.calls if call != "synchronize"] == [
        *("stream", "run", "CUDAGraph", "capture_begin", "run", "capture_end", "instantiate")
    ]
    cuda.calls.clear()
    runs = iter([None])
    with pytest.raises(StopIteration):
        device.capture(lambda: next(runs))
    assert cuda.calls[-1] == "capture_end"
    assert gc.isenabled()


def test_what_runs_beside_waits_for_what_was_before_and_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, cuda = recorded_device(monkeypatch)
    device.beside(lambda: cuda.calls.append("GEMM"), lambda: cuda.calls.append("LoRA"))
    assert cuda.calls == [
        *("current_stream", "wait_stream", "stream", "LoRA", "GEMM", "wait_stream")
    ]


def test_replays_are_timed_between_events_with_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device, cuda = recorded_device(monkeypatch)
    vars(cuda)["elapsed_time"] = lambda mark: 0.25
    replay = gpu_device.Replay(cuda.replay)
    assert device.times_us([replay, replay]) == [250.0, 250.0]
    assert cuda.calls[-6:] == ["record", "replay", "record", "replay", "record", "synchronize"]
