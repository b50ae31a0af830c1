"""What a GPU is checked with: tests by kernel family, kernels compiled beforehand."""

from pathlib import Path

import pytest
from kernels.calls import checked_sizes

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels import nvrtc as compile_kernels
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.nvrtc import KERNELS
from trt_lora.scripts.bench.gpu import gpu_tests, kernel_compilation
from trt_lora.scripts.bench.gpu.gpu_tests import ROOT
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.worker import Skipped, WrongResultError


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
        assert compile_kernels.compile_lora("sm_90", (kernel,))


def test_a_kernel_that_is_refused_is_a_row_and_the_others_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    good_kernel = next(iter(KERNELS))
    rows: list[ResultRow] = []
    with pytest.raises(BackendError, match="not compiled for sm_90: no_such_kernel"):
        rows.extend(kernel_compilation.rows(H200, ["no_such_kernel", good_kernel]))
    # `extend` keeps what came before the error
    assert {row.name: "refused" in row.notes for row in rows} == {
        "no_such_kernel": True,
        good_kernel: False,
    }


def test_a_family_that_a_gpu_has_not_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests, "current_chip", lambda: Chip((8, 9), 128))
    with pytest.raises(Skipped, match=r"capability \(8, 9\) runs no fused"):
        next(gpu_tests.rows_of_family("fused"))
