"""The GPU benchmark's run: a process for every workload, and what becomes of bad ones."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpu.failing_workloads import aborting, good, hanging, raising
from kernels.calls import checked_sizes
from support.eventually import eventually
from support.fakes.cpu_device import TINY

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.plugins.kernels import nvrtc as compile_kernels
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.nvrtc import KERNELS
from trt_lora.scripts.bench.gpu import main as bench_gpu
from trt_lora.scripts.bench.gpu.machine import ROOT, slug
from trt_lora.scripts.bench.gpu.report import Expectation, Report, ResultRow
from trt_lora.scripts.bench.gpu.runner import Runner
from trt_lora.scripts.bench.gpu.session import Options
from trt_lora.scripts.bench.gpu.worker import Skipped, Workload, WrongResultError
from trt_lora.scripts.bench.gpu.workload_list import gpu_workloads
from trt_lora.scripts.bench.gpu.workloads import gpu_tests, kernel_compilation


def run(
    folder: Path, *workloads: Workload, seconds: float = 60.0, grace_seconds: float = 60.0
) -> tuple[bool, dict[str, Any]]:
    """Run workloads; return whether none failed, and what was written about each."""
    report = Report(folder / "gpu.json")
    deadline = time.monotonic() + seconds
    runner = Runner(report, deadline, grace_seconds, tell=lambda line: None)
    succeeded = runner.run(workloads)
    return succeeded, written(folder)["workloads"]


def written(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return result


def workload(name: str, rows: Callable[[], Iterator[ResultRow]], weight: float = 1) -> Workload:
    us = {"us": Expectation(1, 2)}
    return Workload(name, "?", weight, rows, {"first": {}, "second": us})


GOOD = partial(good, ("first", "second"))


def test_every_workload_has_a_process_of_its_own(tmp_path: Path) -> None:
    succeeded, results = run(tmp_path, workload("a", GOOD), workload("b", GOOD))
    assert succeeded
    pids = {name: {row["sizes"]["pid"] for row in each["rows"]} for name, each in results.items()}
    assert len(pids["a"] | pids["b"] | {os.getpid()}) == 3
    assert [each["outcome"] for each in results.values()] == ["done", "done"]
    assert results["a"]["rows"][1]["ratios"]["us"]["gap"] == 1.0


def test_an_abort_is_a_row_and_the_next_workload_runs(tmp_path: Path) -> None:
    succeeded, results = run(tmp_path, workload("bad", aborting), workload("next", GOOD))
    assert not succeeded
    assert results["bad"]["outcome"] == "crashed"
    first, bad = results["bad"]["rows"]
    assert first["name"] == "first"
    assert bad == {
        "name": "second",
        "outcome": "crashed",
        "reason": "its process ended with SIGABRT",
    }
    output = "\n".join(results["bad"]["output"])
    assert "terminate called without an active exception" in output
    assert "in aborting" in output, "the stack of the process is lost"
    assert results["next"]["outcome"] == "done"


def test_a_hang_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    bad = workload("bad", partial(hanging, pids), weight=0.01)
    _, results = run(tmp_path, bad, workload("next", GOOD), seconds=90.0, grace_seconds=8.0)
    assert results["bad"]["outcome"] == "hung"
    assert [row["name"] for row in results["bad"]["rows"]] == ["first", "second"]
    assert results["bad"]["rows"][1]["outcome"] == "hung"
    assert "in hanging" in "\n".join(results["bad"]["output"])
    assert results["next"]["outcome"] == "done"
    started = [int(pid) for pid in pids.read_text().split()]
    assert eventually(lambda: not any(map(is_running, started)))


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("address", "illegal address"),
        ("refused", "refused"),
        ("wrong", "wrong result"),
        ("raised", "raised"),
    ],
)
def test_what_is_raised_has_a_name_and_keeps_the_rows(
    tmp_path: Path, kind: str, outcome: str
) -> None:
    bad = workload("bad", partial(raising, kind))
    succeeded, results = run(tmp_path, bad, workload("next", GOOD))
    assert not succeeded
    assert [row.get("outcome", "") for row in results["bad"]["rows"]] == ["", outcome]
    assert results["bad"]["reason"]
    assert results["bad"]["not_reached"] == ["second"]
    assert results["next"]["outcome"] == "done"


def test_a_skip_is_an_answer_and_no_failure(tmp_path: Path) -> None:
    succeeded, results = run(tmp_path, workload("a", partial(raising, "skipped")))
    assert succeeded
    assert results["a"]["reason"] == "no TensorRT runs here"


def test_a_workload_stops_at_its_share_and_time_saved_goes_to_the_others(tmp_path: Path) -> None:
    names = tuple(f"r{index}" for index in range(1000))
    slow = Workload("slow", "?", 1, partial(good, names, 0.1), {name: {} for name in names})
    last = workload("last", GOOD, weight=30)
    succeeded, results = run(tmp_path, slow, last, seconds=62.0)
    assert succeeded
    assert results["slow"]["outcome"] == "out of time"
    reached = len(results["slow"]["rows"])
    assert 0 < reached < 100
    assert results["slow"]["not_reached"] == list(names[reached:])
    assert results["last"]["outcome"] == "done"


def test_nothing_is_begun_when_no_time_is_left(tmp_path: Path) -> None:
    _, results = run(tmp_path, workload("late", GOOD), seconds=-1.0)
    assert results["late"]["outcome"] == "out of time"
    assert results["late"]["not_reached"] == ["first", "second"]


def test_rows_are_on_disk_as_they_come(tmp_path: Path) -> None:
    rows_on_disk: list[int] = []

    def look(line: str) -> None:
        if line.startswith("  "):
            rows_on_disk.append(len(written(tmp_path)["workloads"]["a"]["rows"]))

    report = Report(tmp_path / "gpu.json")
    runner = Runner(report, time.monotonic() + 60, tell=look)
    runner.run([Workload("a", "?", 1, partial(good, ("r0", "r1", "r2")))])
    assert rows_on_disk == [1, 1, 2, 2, 3, 3]  # a line for a row and one for its ratio


def test_predictions_are_in_the_file_before_anything_runs(tmp_path: Path) -> None:
    seen: list[Any] = []

    def look(line: str) -> None:
        seen.append(written(tmp_path)["predictions"])

    Runner(Report(tmp_path / "gpu.json"), time.monotonic() - 1, tell=look).run(
        [workload("w", GOOD)]
    )
    assert seen[0] == {"w": {"first": {}, "second": {"us": {"prediction": [1.0, 2.0]}}}}


# ---- what runs, and in which order


def names_of(workloads: Sequence[Workload]) -> list[str]:
    return [each.name for each in workloads]


def test_workloads_run_in_order_of_worth() -> None:
    assert names_of(gpu_workloads(Options(model=TINY))) == [
        "kernels",
        *("correctness:decode", "correctness:fused", "correctness:fused_tiles"),
        *("correctness:shrink+expand", "correctness:shrink_tiles+expand_tiles"),
        *("tests", "decode-step:r16", "tensorrt", "ceilings", "lora-group", "decode-step:sweep"),
        *("mixed-rows", "slot-switch"),
        *("engine-step", "prefill", "switch", "load", "idle", "decode-step-compiled"),
    ]


def test_the_first_decode_steps_are_those_of_rank_16() -> None:
    first = next(w for w in gpu_workloads(Options()) if w.name == "decode-step:r16")
    assert list(first.expected) == ["m1 r16", "m8 r16"]


def test_workloads_are_chosen_by_name() -> None:
    workloads = gpu_workloads(Options(model=TINY))
    chosen = bench_gpu.chosen(workloads, ["decode-step", "tests"])
    assert names_of(chosen) == ["kernels", "tests", "decode-step:r16", "decode-step:sweep"]
    one = bench_gpu.chosen(workloads, ["decode-step:r16"])
    assert names_of(one) == ["kernels", "decode-step:r16"]
    assert bench_gpu.chosen(workloads, None) == workloads
    with pytest.raises(ConfigError, match=r"W2: unknown; choose from: ceilings, correctness, "):
        bench_gpu.chosen(workloads, ["W2"])


def test_every_workload_can_be_sent_to_another_process() -> None:
    for each in gpu_workloads(Options()):
        assert pickle.loads(pickle.dumps(each)).name == each.name


def test_without_a_gpu_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gpu, "cuda_obstacle", lambda: "there is no NVIDIA GPU")
    assert bench_gpu.main([]) == 2
    captured = capsys.readouterr()
    assert captured.err == "no benchmark without an NVIDIA GPU: there is no NVIDIA GPU\n"
    assert not captured.out


def test_rows_go_where_they_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = {
        "device": "NVIDIA H200",
        "compute capability": "9.0",
        "multiprocessors": 132,
        "level-2 cache, bytes": 60 << 20,
    }
    monkeypatch.setattr(bench_gpu, "cuda_obstacle", lambda: "")
    monkeypatch.setattr(bench_gpu, "describe_machine", lambda: machine)
    monkeypatch.setattr(bench_gpu, "workloads_for", lambda *_: [workload("tests", GOOD)])
    assert bench_gpu.main(["--output", str(tmp_path / "gpu.json"), "--only", "tests"]) == 0
    assert written(tmp_path)["workloads"]["tests"]["outcome"] == "done"
    assert bench_gpu.FOLDER == ROOT / "docs" / "benchmarks"


def test_a_machine_that_builds_no_models_can_run_it() -> None:
    code = (
        "import sys, trt_lora.scripts.bench.gpu.workload_list as _; "
        "print({'onnx', 'onnx_ir', 'peft', 'transformers', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_device_has_a_name_for_files() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"


# ---- the GPU tests


def test_the_root_is_that_of_the_checkout() -> None:
    assert (ROOT / "pyproject.toml").is_file()
    assert (ROOT / "tests" / "gpu").is_dir()


@pytest.mark.parametrize("part", [*gpu_tests.FAMILIES[:1], gpu_tests.REST])
def test_the_gpu_tests_are_found_and_counted(part: str) -> None:
    (row,) = gpu_tests.rows(part)
    assert row.notes["tests"] > 0
    assert row.notes["wrong"] == 0


@pytest.mark.parametrize("chip", [Chip((9, 0), 132), Chip((8, 9), 128), Chip((12, 0), 188)])
def test_every_call_that_a_gpu_is_checked_with_is_of_one_family(chip: Chip) -> None:
    found = {
        gpu_tests.kernel_family(sizes.shape, chip, aligned=sizes.aligned)
        for sizes in checked_sizes()
    }
    assert found == set(gpu_tests.families(chip))


def gpu_suite(folder: Path, right: bool) -> Path:
    """Tests of two calls of one kernel, and another."""
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--kernels')\n"
    )
    (folder / "test_suite.py").write_text(f"""
import pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("error", [0.25, 0.5])
def test_call(record_property, error):
    record_property("kernels", "fused_float32_1")
    record_property("{gpu_tests.WORST}", error)

def test_other():
    assert {right}
""")
    return folder


def test_the_calls_of_a_kernel_are_one_row(tmp_path: Path) -> None:
    suite, kernel = gpu_tests.rows("fused", folder=gpu_suite(tmp_path, right=True))
    assert (suite.name, suite.notes) == ("tests of fused", {"tests": 3, "wrong": 0, "skipped": 0})
    assert (kernel.name, kernel.sizes) == ("fused_float32_1", {"calls": 2})
    assert kernel.ratios == {gpu_tests.WORST: 0.5}


def test_a_gpu_test_that_fails_is_a_wrong_result(tmp_path: Path) -> None:
    rows = gpu_tests.rows(gpu_tests.REST, folder=gpu_suite(tmp_path, right=False))
    assert next(rows).notes["wrong"] == 1
    with pytest.raises(WrongResultError, match="1 failed"):
        list(rows)


def test_without_a_checkout_the_gpu_tests_are_skipped(tmp_path: Path) -> None:
    with pytest.raises(Skipped, match="this is no checkout"):
        next(gpu_tests.rows(gpu_tests.REST, folder=tmp_path / "tests"))


# ---- kernels, compiled beforehand

H200 = Chip((9, 0), 132)


def test_kernels_are_compiled_into_the_cache_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels = list(KERNELS)[:2]
    assert {row.name for row in kernel_compilation.rows(H200, kernels)} == set(kernels)

    def refuse(*args: object) -> bytes:
        raise AssertionError("compiled once more")

    monkeypatch.setattr(compile_kernels, "compile_source", refuse)
    for kernel in kernels:
        assert compile_kernels.compile_ptx("compute_90", (kernel,))


def test_a_kernel_that_is_refused_is_a_row_and_the_others_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    good_kernel = next(iter(KERNELS))
    rows: list[ResultRow] = []
    with pytest.raises(BackendError, match="not compiled for compute_90: no_such_kernel"):
        rows.extend(kernel_compilation.rows(H200, ["no_such_kernel", good_kernel]))
    # `extend` keeps what came before the error
    assert {row.name: "refused" in row.notes for row in rows} == {
        "no_such_kernel": True,
        good_kernel: False,
    }
