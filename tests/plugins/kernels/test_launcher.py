"""Launching the kernels, on a driver that only keeps what it is told."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from kernels.emulator import BUILD, compiler, load
from support.fakes.fake_driver import FakeDriver, Status

from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.plugins.kernels import launcher
from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape, SiteShape, StackShape
from trt_lora.plugins.kernels.launch_plan import Chip, plan_launches
from trt_lora.plugins.kernels.launcher import (
    KernelGroup,
    Kernels,
    KernelSite,
    KernelStacks,
    group_of,
    load_kernels,
)
from trt_lora.plugins.kernels.nvrtc import kernels_of

SHAPE = GroupShape(2, 64, (SiteShape(32, 8), SiteShape(16, 1)), "float16", has_addend=True)
BUFFERS = GroupBuffers(
    0x1000, (0x2000, 0x3000), (0x4000, 0x5000), (0x6000, 0x7000), (0x80, 0x90), 10
)
OTHERS = GroupBuffers(16, (32, 48), (64, 80), (96, 112), (128, 144), 61)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place for compiled kernels that outlasts the tests, and is not the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(BUILD))


@pytest.mark.skipif(compiler() is None, reason="needs g++")
def test_the_argument_is_laid_out_as_the_compiler_does() -> None:
    expected = [ctypes.sizeof(KernelGroup), ctypes.sizeof(KernelSite)]
    for structure in (KernelGroup, KernelSite):
        expected += [getattr(structure, field[0]).offset for field in structure._fields_]
    expected.append(ctypes.sizeof(KernelStacks))
    expected += [getattr(KernelStacks, field[0]).offset for field in KernelStacks._fields_]
    found = (ctypes.c_int * len(expected))()
    load().layout(found)
    assert list(found) == expected


def test_a_group_has_each_sites_addresses_and_first_column() -> None:
    group = group_of(SHAPE, BUFFERS, splits=3)
    assert (group.x, group.workspace, group.m, group.k) == (0x1000, 10, 2, 64)
    assert (group.sites, group.total_rank, group.splits) == (2, 9, 3)
    found = [(s.a, s.b, s.y, s.out, s.n, s.rank, s.column) for s in group.site[:2]]
    assert found == [
        (0x2000, 0x4000, 0x6000, 0x80, 32, 8, 0),
        (0x3000, 0x5000, 0x7000, 0x90, 16, 1, 8),
    ]
    assert [s.rank_tile for s in group.site[:2]] == [0, 1]
    assert group.rank_tiles == 2


def test_a_delta_has_no_y() -> None:
    shape = GroupShape(2, 64, SHAPE.sites, "float16", has_addend=False)
    buffers = GroupBuffers(1, (1, 2), (3, 4), (), (5, 6), 7)
    assert [site.y for site in group_of(shape, buffers, 1).site[:2]] == [None, None]
    with pytest.raises(TensorError, match=r"takes \(2, 2, 0, 2\) .* given \(2, 2, 2, 2\)"):
        group_of(shape, BUFFERS, 1)


H200, A100 = Chip((9, 0), 132), Chip((8, 0), 108)


@pytest.fixture
def driver(kept: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver with one GPU in the place of NVIDIA's."""
    fake = FakeDriver(H200)
    with fake.installed(monkeypatch):
        yield fake


def test_a_call_is_launched_as_planned(driver: FakeDriver) -> None:
    Kernels().launch(SHAPE, BUFFERS, 77)
    (planned,), (found,) = plan_launches(SHAPE, H200), driver.launched
    assert (found.kernel, found.grid, found.block) == (planned.kernel, planned.grid, (256, 1, 1))
    assert (found.shared_bytes, found.stream) == (planned.shared_bytes, 77)
    assert found.group == bytes(group_of(SHAPE, BUFFERS, planned.splits))
    assert driver.loaded[0].startswith(b"\x7fELF")  # machine code, not PTX


def test_a_pair_is_launched_in_order_with_one_argument(driver: FakeDriver) -> None:
    driver.chips = [A100]
    long = replace(SHAPE, k=8192)
    Kernels().launch(long, BUFFERS, 0)
    shrink, expand = plan_launches(long, A100)
    assert [(launch.kernel, launch.grid) for launch in driver.launched] == [
        (shrink.kernel, shrink.grid),
        (expand.kernel, expand.grid),
    ]
    assert driver.launched[0].group == driver.launched[1].group
    assert all(code.startswith(b"\x7fELF") for code in driver.loaded)


def test_a_kernel_is_loaded_once(driver: FakeDriver) -> None:
    for m in (2, 2, 3):
        Kernels().launch(replace(SHAPE, m=m), BUFFERS, 0)
    assert (len(driver.loaded), len(driver.launched)) == (1, 3)


@pytest.mark.parametrize("chip", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("has_slots", [False, True], ids=["one", "slots"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_loaded_is_neither_compiled_nor_loaded_by_a_call(
    driver: FakeDriver, dtype: str, has_slots: bool, chip: Chip, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(arch: str, names: Sequence[str]) -> bytes:
        return "".join(f".entry {name}()" for name in names).encode()

    monkeypatch.setattr(launcher, "compile_lora", compiled)
    driver.chips = [chip]
    Kernels().load(dtype, has_slots=has_slots)
    before = driver.calls.copy()
    assert {(0, name) for name in kernels_of(dtype, has_slots=has_slots)} == driver.ready
    stacks = StackShape(4, 2, (0, 1)) if has_slots else None
    for m in (1, 2, 3, 5, 8, 9, 16, 33, 64, 65, 200, 1024):
        for k in (64, 72):  # aligned, and not
            shape = replace(SHAPE, m=m, k=k, dtype=dtype, stacks=stacks)
            buffers = BUFFERS._replace(slot=8, rank=16) if has_slots else BUFFERS
            Kernels().launch(shape, buffers, 0)
            Kernels().launch(shape, buffers._replace(x=0x3), 0)
    behind = set(driver.calls[len(before) :])
    assert "cuLaunchKernel" in behind
    assert behind.isdisjoint({"cuLibraryLoadData", "cuLibraryGetKernel", "cuFuncLoad"})
    assert {(launch.device, launch.kernel) for launch in driver.launched} <= driver.ready


@pytest.mark.parametrize(("current", "stream"), [(0, 9), (1, 9), (1, 0)])
def test_a_call_is_planned_for_the_gpu_of_its_stream_whichever_is_current(
    driver: FakeDriver, current: int, stream: int
) -> None:
    driver.chips, driver.current = [H200, A100], lambda: current
    driver.device_of = {8: 0, 9: 1}.__getitem__
    Kernels().launch(SHAPE, BUFFERS, 8)
    Kernels().launch(SHAPE, BUFFERS, stream)
    on_h200, on_a100 = plan_launches(SHAPE, H200), plan_launches(SHAPE, A100)
    assert on_h200 != on_a100
    assert [(each.device, each.kernel, each.grid) for each in driver.launched] == [
        *((0, each.kernel, each.grid) for each in on_h200),
        *((1, each.kernel, each.grid) for each in on_a100),
    ]


def test_a_planned_call_asks_the_driver_for_nothing_but_its_launch(driver: FakeDriver) -> None:
    planned = Kernels().planned(SHAPE, 77)
    driver.calls.clear()
    for buffers in (BUFFERS, OTHERS):
        planned.launch(buffers, 77)
    assert driver.calls == ["cuLaunchKernel"] * 2


def addresses(group: bytes) -> GroupBuffers:
    """The addresses in an argument of two sites."""
    found = KernelGroup.from_buffer_copy(group)
    a, b, y, out = zip(*((s.a, s.b, s.y, s.out) for s in found.site[:2]), strict=True)
    return GroupBuffers(found.x, a, b, y, out, found.workspace)


def test_a_planned_call_takes_other_addresses_at_every_launch(driver: FakeDriver) -> None:
    planned = Kernels().planned(SHAPE, 77)
    fields = range(len(BUFFERS))
    mixed = [(*OTHERS[:i], BUFFERS[i], *OTHERS[i + 1 :]) for i in fields]
    given = [BUFFERS, OTHERS, BUFFERS, *map(GroupBuffers._make, mixed)]
    for buffers in given:
        planned.launch(buffers, 77)
    assert [addresses(each.group) for each in driver.launched] == given


def test_calls_of_one_shape_do_not_write_into_each_others_argument(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Kernels().planned(SHAPE, 77) for _ in range(2))
    launch = driver._cuLaunchKernel

    def interrupted(*args: Any) -> tuple[()]:
        monkeypatch.setattr(driver, "_cuLaunchKernel", launch)
        second.launch(OTHERS, 77)  # of another thread: the driver runs without Python's lock
        return launch(*args)

    monkeypatch.setattr(driver, "_cuLaunchKernel", interrupted)
    first.launch(BUFFERS, 77)
    assert [addresses(each.group) for each in driver.launched] == [OTHERS, BUFFERS]


def test_a_planned_call_refuses_a_missing_address_and_launches_nothing(driver: FakeDriver) -> None:
    planned = Kernels().planned(SHAPE, 77)
    with pytest.raises(TensorError, match=r"takes \(2, 2, 2, 2\) .* given \(2, 2, 0, 2\)"):
        planned.launch(BUFFERS._replace(y=()), 77)
    assert driver.launched == []


@pytest.mark.parametrize(
    "moved",
    [
        BUFFERS._replace(x=0x1002),
        BUFFERS._replace(a=(0x2000, 0x3008)),
        BUFFERS._replace(b=(0x4004, 0x5000)),
        BUFFERS._replace(y=(0x6000, 0x7002)),
        BUFFERS._replace(out=(0x82, 0x90)),
    ],
    ids=["x", "a", "b", "y", "out"],
)
def test_addresses_that_are_not_aligned_are_launched_as_planned_for_them(
    driver: FakeDriver, moved: GroupBuffers
) -> None:
    planned = Kernels().planned(SHAPE, 77)
    for buffers in (moved, BUFFERS):
        planned.launch(buffers, 77)
    aligned, unaligned = (plan_launches(SHAPE, H200, aligned=each) for each in (True, False))
    assert aligned != unaligned
    found = [(each.kernel, each.grid) for each in driver.launched]
    assert found == [(each.kernel, each.grid) for each in (*unaligned, *aligned)]


def test_a_refused_launch_has_nvidias_words(driver: FakeDriver) -> None:
    Kernels().launch(SHAPE, BUFFERS, 0)
    driver.status = 700
    with pytest.raises(BackendError, match=r"an illegal memory access .*\(CUDA_ERROR_ILLEGAL_ADD"):
        Kernels().launch(SHAPE, BUFFERS, 0)


def test_a_driver_that_is_older_than_the_compiler_is_told_so(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Status, "name", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION")
    driver.status = 222
    with pytest.raises(
        BackendError, match=r"_PTX_VERSION\); the driver is older than NVRTC: update"
    ):
        load_kernels(b"ptx", ["decode_float16"])
