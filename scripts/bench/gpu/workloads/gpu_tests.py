"""The tests marked `gpu`, run in a process of their own."""

import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from trt_lora.scripts.bench.gpu.machine import ROOT
from trt_lora.scripts.bench.gpu.report import ResultRow
from trt_lora.scripts.bench.gpu.worker import Skipped, WrongResultError

TESTS_SECONDS = 150


def rows(
    seconds: float = TESTS_SECONDS, folder: Path = ROOT / "tests" / "gpu"
) -> Iterator[ResultRow]:
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
    yield ResultRow(
        "tests marked gpu",
        {"seconds": round(time.monotonic() - start, 1)},
        notes=counts | ({"output": output[-40:]} if counts["wrong"] else {}),
    )
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
