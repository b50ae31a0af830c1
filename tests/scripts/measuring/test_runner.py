"""A benchmark's run: a process for every workload, and what becomes of bad ones."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.eventually import eventually

from trt_lora.scripts.measuring.report import Report
from trt_lora.scripts.measuring.runner import Runner
from trt_lora.scripts.measuring.worker import Workload


def run(
    folder: Path, *workloads: Workload, seconds: float = 60.0, grace_seconds: float = 60.0
) -> tuple[bool, dict[str, Any]]:
    """Run workloads; return whether none failed, and what was written about each."""
    report = Report(folder / "gpu.json")
    deadline = time.monotonic() + seconds
    runner = Runner(report, deadline, grace_seconds, log=lambda line: None)
    succeeded = runner.run(workloads)
    return succeeded, written(folder)["workloads"]


def written(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return result


def workload(name: str, ends: str, *arguments: object, weight: float = 1) -> Workload:
    return Workload(name, "?", weight, f"gpu.failing_workloads:{ends}", arguments)


GOOD = ("good", ("first", "second"))


def test_every_workload_has_a_process_of_its_own(tmp_path: Path) -> None:
    succeeded, results = run(tmp_path, workload("a", *GOOD), workload("b", *GOOD))
    assert succeeded
    pids = {name: {row["sizes"]["pid"] for row in each["rows"]} for name, each in results.items()}
    assert len(pids["a"] | pids["b"] | {os.getpid()}) == 3
    assert [each["outcome"] for each in results.values()] == ["done", "done"]
    assert results["a"]["rows"][1]["ratios"] == {"us": {"value": 3.0}}


def test_an_abort_is_a_row_and_the_next_workload_runs(tmp_path: Path) -> None:
    succeeded, results = run(tmp_path, workload("bad", "aborting"), workload("next", *GOOD))
    assert not succeeded
    assert results["bad"]["outcome"] == "crashed"
    assert [row["name"] for row in results["bad"]["rows"]] == ["first"]
    assert results["bad"]["reason"] == "its process ended with SIGABRT"
    output = "\n".join(results["bad"]["output"])
    assert "terminate called without an active exception" in output
    assert "in aborting" in output, "the stack of the process is lost"
    assert results["next"]["outcome"] == "done"


def test_a_hang_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    bad = workload("bad", "hanging", pids, weight=0.01)
    _, results = run(tmp_path, bad, workload("next", *GOOD), seconds=90.0, grace_seconds=8.0)
    assert results["bad"]["outcome"] == "hung"
    assert [row["name"] for row in results["bad"]["rows"]] == ["first"]
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
    bad = workload("bad", "raising", kind)
    succeeded, results = run(tmp_path, bad, workload("next", *GOOD))
    assert not succeeded
    assert results["bad"]["outcome"] == outcome
    assert [row["name"] for row in results["bad"]["rows"]] == ["first"]
    assert results["bad"]["reason"]
    assert results["next"]["outcome"] == "done"


def test_a_skip_is_an_answer_and_no_failure(tmp_path: Path) -> None:
    succeeded, results = run(tmp_path, workload("a", "raising", "skipped"))
    assert succeeded
    assert results["a"]["reason"] == "no TensorRT runs here"


def test_a_workload_stops_at_its_share_and_time_saved_goes_to_the_others(tmp_path: Path) -> None:
    names = tuple(f"r{index}" for index in range(1000))
    slow = workload("slow", "good", names, 0.1)
    last = workload("last", *GOOD, weight=30)
    succeeded, results = run(tmp_path, slow, last, seconds=62.0)
    assert succeeded
    assert results["slow"]["outcome"] == "out of time"
    assert 0 < len(results["slow"]["rows"]) < 100
    assert results["last"]["outcome"] == "done"


def test_nothing_is_begun_when_no_time_is_left(tmp_path: Path) -> None:
    _, results = run(tmp_path, workload("late", *GOOD), seconds=-1.0)
    assert results["late"]["outcome"] == "out of time"
    assert results["late"]["rows"] == []


def test_rows_are_on_disk_as_they_come(tmp_path: Path) -> None:
    rows_on_disk: list[int] = []

    def look(line: str) -> None:
        if line.startswith("  "):
            rows_on_disk.append(len(written(tmp_path)["workloads"]["a"]["rows"]))

    report = Report(tmp_path / "gpu.json")
    runner = Runner(report, time.monotonic() + 60, log=look)
    runner.run([workload("a", "good", ("r0", "r1", "r2"))])
    assert rows_on_disk == [1, 1, 2, 2, 3, 3]  # a line for a row and one for its ratio
