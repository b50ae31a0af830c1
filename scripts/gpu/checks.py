"""What is measured before the workloads: the ceilings, and whether everything is right."""

import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trt_lora.scripts.gpu.bench import Bench
from trt_lora.scripts.gpu.results import Expectation, Expectations, Row
from trt_lora.scripts.gpu.roofline import BYTES_PER_US, LAUNCH_US
from trt_lora.scripts.gpu.run import Skipped
from trt_lora.scripts.gpu.tensorrt import Answer

ROOT = Path(__file__).resolve().parents[1]
_NODES = 1000
_COPY_BYTES = 4 << 30
TESTS_SECONDS = 150


class WrongResultError(RuntimeError):
    """Something computes what it should not."""


CEILINGS: Expectations = {
    "node of a graph": {
        "us": Expectation(*LAUNCH_US),
        "us, in a cluster": Expectation(*LAUNCH_US),
    },
    "copy on the device": {"TB/s": Expectation(0.97 * BYTES_PER_US / 1e6, BYTES_PER_US / 1e6)},
}


def ceiling_rows(bench: Bench) -> Iterator[Row]:
    """Measure an empty node, alone and in a cluster, and the bandwidth of a copy."""
    ratios = {
        "us": _node_us(bench, clusters=False),
        "us, in a cluster": _node_us(bench, clusters=True),
    }
    yield Row("node of a graph", {"nodes": _NODES}, ratios=ratios)
    nbytes = min(_COPY_BYTES, bench.device.free_bytes() // 4)
    source = bench.device.random(nbytes // 2)
    target = torch.empty_like(source)
    replay = bench.device.capture(lambda: target.copy_(source))
    us = bench.time({"copy": replay}).median("copy")
    yield Row("copy on the device", {"bytes": nbytes}, ratios={"TB/s": 2 * nbytes / us / 1e6})


def _node_us(bench: Bench, *, clusters: bool) -> float:
    """The difference between two chains, so that the start of a graph does not count."""

    def chain(nodes: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(nodes):
                bench.device.glue.nothing(clusters=clusters)

        return run

    replays = {
        name: bench.device.capture(chain(n)) for name, n in (("a", _NODES), ("b", 2 * _NODES))
    }
    times = bench.time(replays)
    return (times.median("b") - times.median("a")) / _NODES


def tensorrt_rows(answers: Callable[[], list[Answer]]) -> Iterator[Row]:
    """Write down which TensorRT runs here; a refusal is an answer."""
    for answer in answers():
        notes = {"runs": answer.runs, "reached": answer.reached, "reason": answer.reason}
        yield Row(answer.flavour, {}, notes=notes | {"version": answer.version})


def suite_rows(
    seconds: float = TESTS_SECONDS, folder: Path = ROOT / "tests" / "gpu"
) -> Iterator[Row]:
    """Run the tests marked `gpu` in a process of their own.

    Raises:
        WrongResultError: one failed, or they took too long.
    """
    if not folder.is_dir():
        raise Skipped(f"{folder} is not there: this is no checkout")
    with TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        start = time.monotonic()
        output = _pytest(folder, results, seconds)
        counts = _counts(results)
        families = list(_family_rows(results))
    yield Row(
        "tests marked gpu",
        {"seconds": round(time.monotonic() - start, 1)},
        notes=counts | ({"output": output[-40:]} if counts["wrong"] else {}),
    )
    yield from families
    if counts["wrong"] or not counts["tests"]:
        raise WrongResultError("\n".join(output[-5:]))


def _pytest(folder: Path, results: Path, seconds: float) -> list[str]:
    # Nothing of the suite's own conftest, which needs all that builds a model; and a warning of
    # another release of numpy or torch is no error on a machine that has what it has.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
    ]
    command += [f"--confcutdir={folder}", f"--junitxml={results}", str(folder)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise WrongResultError(f"the tests did not end within {seconds:.0f} s") from None
    return (done.stdout + done.stderr).splitlines()


def _counts(results: Path) -> dict[str, int]:
    if not results.is_file():
        return {"tests": 0, "wrong": 1, "skipped": 0}
    suites = list(ET.parse(results).getroot().iter("testsuite"))

    def total(kind: str) -> int:
        return sum(int(suite.get(kind, 0)) for suite in suites)

    return {
        "tests": total("tests"),
        "wrong": total("failures") + total("errors"),
        "skipped": total("skipped"),
    }


def _family_rows(results: Path) -> Iterator[Row]:
    """One row for each family of kernels whose calls were compared with float64."""
    if not results.is_file():
        return
    errors: dict[str, list[float]] = defaultdict(list)
    for case in ET.parse(results).getroot().iter("testcase"):
        noted = {each.get("name"): each.get("value") for each in case.iter("property")}
        if noted.get("family"):
            errors[str(noted["family"])].append(float(str(noted["worst element / allowed"])))
    for family, worst in sorted(errors.items()):
        yield Row(family, {"calls": len(worst)}, ratios={"worst element / allowed": max(worst)})
