"""Planning, compiling and launching the candidate kernels, without a GPU."""

import ctypes
import re
from collections.abc import Iterator

import pytest
from kernels.candidate_emulator import load_candidates
from kernels.emulator import BUILD, compiler
from kernels.ptxas_report import usage_of
from support.fakes.fake_driver import FakeDriver

from trt_lora.plugins.errors import BackendError, ConfigError, TensorError
from trt_lora.plugins.kernels.candidates import (
    CANDIDATE_KERNELS,
    KEPT,
    CandidateBuffers,
    KernelRows,
    LogitsShape,
    candidates_entry_point,
    candidates_source,
    candidates_workspace_bytes,
    compile_candidates,
    kernel_rows,
    launch_candidates,
    plan_candidates,
)
from trt_lora.plugins.kernels.launch_plan import Chip

SHAPE = LogitsShape(8, 128256, "float16")
BUFFERS = CandidateBuffers(0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000, 0x7000)
REGISTERS = 64  # of a thread: four CTAs of 256 share a multiprocessor
SHARED_BYTES = 48 * 1024  # what every GPU grants without being asked for more


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver with one GPU in the place of NVIDIA's; what is compiled is kept for later runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(BUILD))
    fake = FakeDriver(Chip((9, 0), 132))
    with fake.installed(monkeypatch):
        yield fake


def test_every_token_has_a_cta_and_every_row_a_list() -> None:
    parts, rows = plan_candidates(SHAPE)
    assert (parts.kernel, parts.grid) == ("best_of_parts_float16", (63, 8, 1))
    assert (rows.kernel, rows.grid) == ("best_of_rows", (8, 1, 1))
    assert max(parts.shared_bytes, rows.shared_bytes) <= SHARED_BYTES


@pytest.mark.parametrize(("vocabulary", "parts"), [(1, 1), (2048, 1), (2049, 2), (49152, 24)])
def test_the_workspace_holds_a_list_and_a_sum_for_each_part(vocabulary: int, parts: int) -> None:
    shape = LogitsShape(3, vocabulary, "float32")
    assert plan_candidates(shape)[0].grid == (parts, 3, 1)
    assert candidates_workspace_bytes(shape) == 3 * parts * (KEPT + 1) * 8
    rows = kernel_rows(shape, BUFFERS)
    assert rows.sums == 0x7000 + 3 * parts * KEPT * 8


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        (LogitsShape(0, 5, "float32"), TensorError, r"logits \[0, 5\] hold nothing"),
        (LogitsShape(1, 0, "float32"), TensorError, r"logits \[1, 0\] hold nothing"),
        (LogitsShape(1, 5, "int8"), ConfigError, "'int8' is unknown; choose from: float16"),
        (LogitsShape(65536, 5, "float32"), ConfigError, "65536 rows .* several calls"),
    ],
)
def test_logits_that_cannot_be_searched_are_refused(
    shape: LogitsShape, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_candidates(shape)


@pytest.mark.skipif(compiler() is None, reason="needs g++")
def test_the_argument_is_laid_out_as_the_compiler_does() -> None:
    offsets = [getattr(KernelRows, field[0]).offset for field in KernelRows._fields_]
    expected = [ctypes.sizeof(KernelRows), *offsets]
    found = (ctypes.c_int * len(expected))()
    load_candidates().layout(found)
    assert list(found) == expected


def test_both_kernels_are_launched_in_order_with_one_argument(driver: FakeDriver) -> None:
    launch_candidates(SHAPE, BUFFERS, 77)
    parts, rows = plan_candidates(SHAPE)
    assert [(each.kernel, each.grid, each.stream) for each in driver.launched] == [
        (parts.kernel, parts.grid, 77),
        (rows.kernel, rows.grid, 77),
    ]
    first, second = (KernelRows.from_buffer_copy(each.group) for each in driver.launched)
    assert bytes(first) == bytes(second) == bytes(kernel_rows(SHAPE, BUFFERS))
    assert (first.logits, first.tokens, first.vocabulary) == (0x1000, 0x3000, 128256)
    assert all(each.block == (256, 1, 1) for each in driver.launched)


def test_a_later_call_asks_the_driver_for_nothing_but_its_launches(driver: FakeDriver) -> None:
    launch_candidates(SHAPE, BUFFERS, 77)
    driver.calls.clear()
    launch_candidates(LogitsShape(1, 5, "float16"), BUFFERS, 77)
    assert driver.calls == ["cuLaunchKernel"] * 2


def test_a_refused_launch_has_nvidias_words(driver: FakeDriver) -> None:
    launch_candidates(SHAPE, BUFFERS, 0)
    driver.status = 700
    with pytest.raises(BackendError, match="illegal memory access"):
        launch_candidates(SHAPE, BUFFERS, 0)


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("arch", ["compute_80", "compute_90"])
@pytest.mark.parametrize("kernel", CANDIDATE_KERNELS)
def test_every_kernel_compiles_and_rounds_nothing_to_float32(kernel: str, arch: str) -> None:
    """A float32 exponential or a flushed denormal would show in the totals of a GPU alone."""
    ptx = compile_candidates(arch, (kernel,)).decode()
    (nbytes,) = re.findall(rf"\.entry {kernel}\(\s*\.param \.align 8 \.b8 \w+\[(\d+)\]", ptx)
    assert int(nbytes) == ctypes.sizeof(KernelRows)
    assert "div.rn.f64" in ptx
    assert "ex2.approx" not in ptx
    assert "cvt.rn.f32.f64" not in ptx
    assert ".ftz" not in ptx


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_no_kernel_spills_or_takes_more_registers_than_it_may(arch: str) -> None:
    text = candidates_source() + "".join(map(candidates_entry_point, CANDIDATE_KERNELS))
    report = usage_of(arch, text)
    assert report.keys() == set(CANDIDATE_KERNELS)
    for kernel, usage in report.items():
        assert usage[1:] == (0, 0, 0), (kernel, usage)
        assert 0 < usage.registers <= REGISTERS, (kernel, usage)
