"""Tests marked `gpu`, by kernel family, in a subprocess each; and NVIDIA's search for races."""

import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from trt_lora.plugins.kernels.group_call import GroupShape
from trt_lora.plugins.kernels.launch_plan import Chip, plan_launches
from trt_lora.runtime.memory.cuda import call
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.worker import Skipped, WrongResultError

FAMILIES = ("decode", "fused", "fused_tiles", "shrink+expand", "shrink_tiles+expand_tiles")
REST = "none"  # the tests that are of no family
WORST = "worst element / allowed"  # the error of an output in parts of what rounding explains
ROOT = Path(__file__).resolve().parents[3]  # of the checkout
FOLDER = ROOT / "tests" / "gpu"
TESTS_SECONDS = 150
RACE_SECONDS = 120
RACECHECK = ("compute-sanitizer", "--tool", "racecheck", "--error-exitcode", "86")
# Tiles of a site without a rank behind those of one with a rank, at real sizes: most shared memory
# that one thread of a CTA writes while others read.
RACED = f"{FOLDER}/test_slots_on_gpu.py::test_a_site_without_a_rank_leaves_the_tile_before_it_alone"
RACED_TESTS = tuple(f"{RACED}[float16-{n}]" for n in (14336, 14464))
_NEEDED = ("pytest", "numpy", "ml_dtypes")  # by the tests
_NO_RESULTS = '<testsuites><testsuite errors="1"/></testsuites>'  # pytest could not begin


def current_chip() -> Chip:
    """Return what the kernels are planned for on the current GPU; makes a CUDA context."""
    call("cudaFree", call("cudaMalloc", 256))  # the context that the driver's calls ask for
    properties = call("cudaGetDeviceProperties", int(call("cudaGetDevice")))
    return Chip((properties.major, properties.minor), properties.multiProcessorCount)


def families(chip: Chip) -> tuple[str, ...]:
    """Return the families that a chip gets: `fused` ones need clusters."""
    if chip.cluster > 1:
        return FAMILIES
    return tuple(name for name in FAMILIES if not name.startswith("fused"))


def rows_of_family(family: str) -> Iterator[ResultRow]:
    """Run the tests of one family of kernels on the current GPU.

    Raises:
        Skipped: the GPU has no such kernels.
        WrongResultError: one failed, or they took too long.
    """
    chip = current_chip()
    if family not in families(chip):
        raise Skipped(f"a GPU of compute capability {chip.compute_capability} runs no {family}")
    yield from rows(family)


def kernel_family(shape: GroupShape, chip: Chip, *, aligned: bool) -> str:
    """Return which of `FAMILIES` computes a call on a chip."""
    names = [launch.kernel for launch in plan_launches(shape, chip, aligned=aligned)]
    return "+".join(name.partition(f"_{shape.dtype}")[0] for name in names)


def rows(part: str, seconds: float = TESTS_SECONDS, folder: Path = FOLDER) -> Iterator[ResultRow]:
    """Run one part of the tests; a row for all of it, and one for each kernel.

    Args:
        part: one of `FAMILIES`, or `REST`.
        seconds: after which they are ended.
        folder: where the tests are.

    Raises:
        Skipped: the folder is not there, or what the tests need is not installed.
        WrongResultError: one failed, or they took too long.
    """
    _check(folder)
    with TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        start = time.monotonic()
        output = _pytest(folder, part, results, seconds)
        suite = ET.parse(results if results.is_file() else StringIO(_NO_RESULTS)).getroot()
    counts = _counts(suite)
    yield ResultRow(
        f"tests of {part}" if part in FAMILIES else "tests of the rest",
        {"seconds": round(time.monotonic() - start, 1)},
        notes=counts | ({"output": output[-40:]} if counts["wrong"] else {}),
    )
    yield from _kernel_rows(suite)
    if counts["wrong"] or not counts["tests"]:
        raise WrongResultError("\n".join(output[-5:]))


def race_rows(seconds: float = RACE_SECONDS) -> Iterator[ResultRow]:
    """Run the tests that a race has failed once under compute-sanitizer, on the current GPU.

    Raises:
        Skipped: compute-sanitizer, of the CUDA toolkit, or what the tests need is missing.
        WrongResultError: there is a race, the test failed, or it took too long.
    """
    _check(FOLDER)
    if shutil.which(RACECHECK[0]) is None:
        raise Skipped(f"{RACECHECK[0]}, which is part of the CUDA toolkit, is not on the path")
    start = time.monotonic()
    done = _run([*RACECHECK, *_PYTEST, f"--confcutdir={FOLDER}", *RACED_TESTS], seconds)
    output = (done.stdout + done.stderr).splitlines()
    notes = {"exit status": done.returncode, "output": output[-40:]}
    yield ResultRow("races", {"seconds": round(time.monotonic() - start, 1)}, notes=notes)
    if done.returncode:
        raise WrongResultError("\n".join(output[-5:]))


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise Skipped(f"{folder} is not there: this is no checkout")
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise Skipped(f"the tests need {', '.join(missing)}, and that is not installed")


# Nothing of the suite's own conftest, which needs all that builds a model; and a warning of another
# release of numpy or torch is no error on a machine that has what it has.
_PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default"),
    *("-p", "no:cacheprovider"),
)


def _pytest(folder: Path, part: str, results: Path, seconds: float) -> list[str]:
    command = [*_PYTEST, f"--confcutdir={folder}", f"--kernels={part}"]
    done = _run([*command, f"--junitxml={results}", str(folder)], seconds)
    return (done.stdout + done.stderr).splitlines()


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise WrongResultError(f"the tests did not end within {seconds:.0f} s") from None


def _counts(suite: ET.Element) -> dict[str, int]:
    def total(kind: str) -> int:
        return sum(int(each.get(kind, 0)) for each in suite.iter("testsuite"))

    wrong = total("failures") + total("errors")
    return {"tests": total("tests"), "wrong": wrong, "skipped": total("skipped")}


def _kernel_rows(suite: ET.Element) -> Iterator[ResultRow]:
    """One row for each kernel, or two that follow one another, compared with float64."""
    errors: dict[str, list[float]] = defaultdict(list)
    for case in suite.iter("testcase"):
        noted = {each.get("name"): each.get("value") for each in case.iter("property")}
        if noted.get("kernels"):
            errors[str(noted["kernels"])].append(float(str(noted[WORST])))
    for kernels, worst in sorted(errors.items()):
        yield ResultRow(kernels, {"calls": len(worst)}, ratios={WORST: max(worst)})
