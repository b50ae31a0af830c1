"""Ceilings, GEMMs and early kernels of the GPU benchmark: on a CPU, a fake driver and NVRTC."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kernels import emulator
from support.fakes.cpu_device import TINY, CpuDevice
from support.fakes.fake_driver import FakeDriver

from trt_lora.plugins import cuda_bindings as cuda_library
from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape, SiteShape, StackShape
from trt_lora.plugins.kernels.launch_plan import Chip, plan_launches
from trt_lora.plugins.kernels.launcher import group_of
from trt_lora.plugins.kernels.nvrtc import compile_source, source
from trt_lora.scripts.bench.diffusion.shapes import LinearGroups
from trt_lora.scripts.bench.gpu import (
    beside_gemm,
    ceilings,
    contestants,
    denoisers,
    gpu_tests,
    kernels,
)
from trt_lora.scripts.bench.gpu.group_calls import GroupCell
from trt_lora.scripts.bench.llama import LinearShape
from trt_lora.scripts.bench.workload_list import GPU
from trt_lora.scripts.measuring import worker
from trt_lora.scripts.measuring.report import Report
from trt_lora.scripts.measuring.runner import Runner
from trt_lora.scripts.measuring.worker import Skipped, Workload, WorkloadOutcome, WrongResultError

H200, A100 = Chip((9, 0), 132), Chip((8, 0), 108)
SHAPE = GroupShape(2, 64, (SiteShape(32, 16), SiteShape(24, 8)), "float16", True)
BUFFERS = GroupBuffers(16, (32, 48), (64, 80), (96, 112), (128, 144), 160)
needs_compiler = pytest.mark.skipif(emulator.compiler() is None, reason="there is no g++")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that a CPU runs at once."""
    monkeypatch.setattr(ceilings, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(beside_gemm, "CALLS", 2)
    for name in ("_LEAST_CALLS", "_MOST_CALLS"):
        monkeypatch.setattr(kernels, name, 2)


@pytest.mark.usefixtures("small")
def test_ceilings_are_a_copy_and_nodes_that_do_nothing() -> None:
    device: Any = CpuDevice()
    device.times_us = lambda replays: [{3: 100.0}[len(replays)]] * 3
    found, row = ceilings.measure(device, rounds=2)
    assert found.megahertz == row.variants["MHz"] == 1755
    assert found.bytes_per_us == 2 * ceilings.COPY_BYTES * ceilings.COPIES / 100
    assert row.variants["copy, TB/s"] == found.bytes_per_us / 1e6
    assert found.node_us == row.variants["empty node, us"] == 100 / ceilings.NODES


@needs_compiler
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("rank", "name"), [(16, "o m8 r16 one adapter"), (1, "o m8 idle")])
def test_lora_is_timed_behind_and_beside_its_gemm(rank: int, name: str) -> None:
    device = CpuDevice()
    row = beside_gemm.measure(device, GroupCell("o", 8, rank), TINY, rounds=2)
    assert row.name == name
    assert set(row.ratios) == {"behind / GEMM", "beside / GEMM"}
    assert {shape.sites for shape in device.kernels.shapes} == {(SiteShape(64, rank),)}


@needs_compiler
@pytest.mark.usefixtures("small")
def test_a_denoisers_linears_and_the_patches_of_a_convolution_are_timed() -> None:
    cells, device = [*denoisers.cells()], CpuDevice()
    assert len(cells) == len({cell.name for cell in cells}) == 16
    assert {(cell.m, cell.rank) for cell in cells} == {(4096, 16), (4096, 64)}
    tiny = LinearGroups(
        {cells[0].group: (LinearShape("to_q", 64, 32), LinearShape("to_k", 64, 16))}
    )
    row = beside_gemm.measure(device, replace(cells[0], m=8), tiny, rounds=2)
    assert set(row.ratios) == {"behind / GEMM", "beside / GEMM"}
    row = denoisers.measure(device, 2, 8, 16, rounds=2)
    assert (row.sizes["m"], row.sizes["k"]) == (4, 9 * 8)
    assert set(row.ratios) == {"gather / conv", "conv and LoRA / conv"}


# ---- every workload, as the list has it


class SmallDevice(CpuDevice):
    """In the place of the GPU."""


@needs_compiler
@pytest.mark.usefixtures("small")
def test_every_workload_of_the_list_that_needs_no_other_process_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = GroupCell("o", 1, 16)
    for module in (kernels, beside_gemm):
        monkeypatch.setattr(module, "cells", lambda: iter([cell]))
        real = module.measure
        monkeypatch.setattr(
            module,
            "measure",
            lambda *args, real=real: real(*args, model=TINY, rounds=2),
        )
    for module in (ceilings, kernels, beside_gemm):
        monkeypatch.setattr(module, "CudaDevice", SmallDevice)
    found = {}
    for workload in GPU:
        if workload.name in ("ceilings", "kernels", "beside-gemm"):
            sent: list[Any] = []
            end = worker._run(workload.place, workload.arguments, float("inf"), sent.append)
            assert end == {"outcome": WorkloadOutcome.DONE}
            found[workload.name] = [message["row"]["name"] for message in sent]
    assert found == {
        "ceilings": ["ceilings"],
        "kernels": ["o m1 r16 one adapter"],
        "beside-gemm": ["o m1 r16 one adapter"],
    }


def test_ceilings_are_first_and_then_what_is_right() -> None:
    order = [workload.name.partition(":")[0] for workload in GPU]
    assert list(dict.fromkeys(order)) == [
        *("compilation", "ceilings", "correctness", "tests", "races", "kernels", "beside-gemm"),
        *("denoisers", "plan"),
    ]


def test_a_package_that_is_missing_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking.py").write_text("import no_such_wheel.part\n")
    (tmp_path / "wrong.py").write_text("import trt_lora.no_such_module\n")
    workloads = [
        Workload(name, "?", 1, place, arguments)
        for name, place, arguments in (
            ("lacking", "lacking:rows", ()),
            ("wrong", "wrong:rows", ()),
            ("good", "gpu.failing_workloads:good", (["first"],)),
        )
    ]
    monkeypatch.syspath_prepend(tmp_path)
    report = Report(tmp_path / "report.json")
    deadline = time.monotonic() + 60
    succeeded = Runner(report, deadline, log=lambda line: None).run(workloads)
    found = report.content["workloads"]
    assert not succeeded
    assert found["lacking"]["outcome"] == "skipped"
    assert found["lacking"]["reason"] == "no_such_wheel is not installed"
    assert found["wrong"]["outcome"] == "raised"
    assert found["good"]["outcome"] == "done"


@pytest.mark.parametrize("package", ["pytest", "ml_dtypes"])
def test_without_what_the_tests_need_they_are_skipped(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_tests, "find_spec", lambda name: None if name == package else name)
    for rows in (gpu_tests.rows(gpu_tests.REST), gpu_tests.race_rows()):
        with pytest.raises(Skipped, match=f"need {package}, and that is not installed"):
            next(rows)


# ---- NVIDIA's search for races


def sanitizer(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be what is found on the path."""
    tool = folder / gpu_tests.RACECHECK[0]
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_the_raced_test_runs_under_the_sanitizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sanitizer(tmp_path, 'echo "$@"; shift 4; exec "$@"', monkeypatch)
    (row,) = gpu_tests.race_rows()
    said = row.notes["output"]
    assert said[0].startswith("--tool racecheck --error-exitcode 86")
    assert re.search("2 (skipped|passed)", said[-1])  # there are such tests


def test_a_race_is_a_wrong_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizer(tmp_path, "echo RACECHECK SUMMARY: 1 hazard; exit 86", monkeypatch)
    rows = gpu_tests.race_rows()
    assert next(rows).notes["exit status"] == 86
    with pytest.raises(WrongResultError, match="1 hazard"):
        next(rows)


def test_without_the_toolkit_races_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Skipped, match="compute-sanitizer, which is part of the CUDA toolkit"):
        next(gpu_tests.race_rows())


# ---- empty and early kernels


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver with one GPU in the place of NVIDIA's, and no kernels that are kept."""
    contestants._loaded.cache_clear()
    fake = FakeDriver(H200)
    for name in ("CUlaunchAttribute", "CUlaunchAttributeID", "CUlaunchConfig", "CUstream"):
        setattr(fake, name, getattr(cuda_library.bindings("driver"), name))  # NVIDIA's own
    with fake.installed(monkeypatch):
        monkeypatch.setattr(contestants, "bindings", cuda_library.bindings)
        yield fake
    contestants._loaded.cache_clear()


def compiled(text: str, arch: str = "compute_90") -> str:
    return compile_source(text, (f"--gpu-architecture={arch}", "--std=c++17")).decode()


@pytest.mark.parametrize(
    ("chip", "names"), [(H200, ["empty"]), (A100, ["empty_alone"])], ids=["9.0", "8.0"]
)
def test_empty_kernels_have_the_grids_of_the_call(
    driver: FakeDriver, chip: Chip, names: Sequence[str]
) -> None:
    contestants.launch_empty(SHAPE, BUFFERS, 7, chip)
    launches = plan_launches(SHAPE, chip)
    assert [each.kernel for each in driver.launched] == names
    assert [each.grid for each in driver.launched] == [each.grid for each in launches]


def test_empty_kernels_compile_in_clusters_and_without() -> None:
    ptx = compiled(source() + contestants._EMPTY)
    in_clusters, alone = re.findall(r"\.entry (?:empty|empty_alone)\(\)(.*?)\{", ptx, re.DOTALL)
    assert ".reqnctapercluster 8, 1, 1" in in_clusters
    assert "cluster" not in alone


@pytest.mark.parametrize("kernel", ["decode_float16_8", "decode_bfloat16_32"])
def test_an_early_kernel_reads_nothing_before_it_waits_but_asks_for_a_and_b(kernel: str) -> None:
    dtype = kernel.split("_")[1]
    ptx = compiled(contestants.early_text(kernel, dtype))
    before, waited, behind = ptx[ptx.index(f".entry {kernel}") :].partition("griddepcontrol.wait;")
    assert waited
    assert before.count("prefetch.global.L2") == 2
    memory = r"(?:ld|st)\.(?:global|shared)|cp\.async|barrier\.cluster"
    assert not re.search(memory, before)
    assert re.search(memory, behind)
    assert "griddepcontrol" not in behind


def test_an_early_kernel_is_launched_with_programmatic_serialization(driver: FakeDriver) -> None:
    contestants.launch_early(SHAPE, BUFFERS, 7, H200)
    (planned,), (found,) = plan_launches(SHAPE, H200), driver.launched
    assert (found.kernel, found.grid, found.stream) == (planned.kernel, planned.grid, 7)
    assert found.programmatic
    assert found.group == bytes(group_of(SHAPE, BUFFERS, planned.splits))


def test_only_one_kernel_of_one_adapter_in_clusters_can_be_early() -> None:
    stacks = StackShape(8, 2, (0, 1))
    assert contestants.can_be_early(SHAPE, H200)
    assert not contestants.can_be_early(SHAPE, A100)
    assert not contestants.can_be_early(GroupShape(**{**vars(SHAPE), "stacks": stacks}), H200)
    assert not contestants.can_be_early(GroupShape(**{**vars(SHAPE), "m": 64}), H200)
