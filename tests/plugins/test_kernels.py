"""Launching the kernels, on a driver that only keeps what it is told."""

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kernels.emulator import BUILD, compiler, load

from trt_lora.plugins import cuda_library, kernels
from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.plugins.group import GroupBuffers, GroupShape, SiteShape
from trt_lora.plugins.kernels import Group, Kernels, Site, group_of
from trt_lora.plugins.launch import Chip, plan_launches

SHAPE = GroupShape(2, 64, (SiteShape(32, 8), SiteShape(16, 1)), "float16", adds=True)
BUFFERS = GroupBuffers(0x1000, (0x2000, 0x3000), (0x4000, 0x5000), (0x6000, 0x7000), (8, 9), 10)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place for compiled kernels that outlasts the tests, and is not the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(BUILD))


@pytest.mark.skipif(compiler() is None, reason="needs g++")
def test_the_argument_is_laid_out_as_the_compiler_does() -> None:
    expected = [ctypes.sizeof(Group), ctypes.sizeof(Site)]
    for structure in (Group, Site):
        expected += [getattr(structure, field[0]).offset for field in structure._fields_]
    found = (ctypes.c_int * len(expected))()
    load().layout(found)
    assert list(found) == expected


def test_a_group_has_each_sites_addresses_and_first_column() -> None:
    group = group_of(SHAPE, BUFFERS, splits=3)
    assert (group.x, group.workspace, group.m, group.k) == (0x1000, 10, 2, 64)
    assert (group.sites, group.total_rank, group.splits) == (2, 9, 3)
    found = [(s.a, s.b, s.y, s.out, s.n, s.rank, s.column) for s in group.site[:2]]
    assert found == [(0x2000, 0x4000, 0x6000, 8, 32, 8, 0), (0x3000, 0x5000, 0x7000, 9, 16, 1, 8)]


def test_a_delta_has_no_y() -> None:
    shape = GroupShape(2, 64, SHAPE.sites, "float16", adds=False)
    buffers = GroupBuffers(1, (1, 2), (3, 4), (), (5, 6), 7)
    assert [site.y for site in group_of(shape, buffers, 1).site[:2]] == [None, None]
    with pytest.raises(TensorError, match=r"takes \(2, 2, 0, 2\) .* given \(2, 2, 2, 2\)"):
        group_of(shape, BUFFERS, 1)


class Driver:
    """A CUDA driver with one GPU, which keeps what it is told to launch."""

    CUfunction = staticmethod(lambda handle: f"kernel {handle}")

    def __init__(self) -> None:
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=132,
        )
        self.loaded: list[bytes] = []
        self.launched: list[tuple[Any, ...]] = []
        self.groups: list[Group] = []
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: (Status(self.status), *getattr(self, f"_{name}")(*args))

    def cuGetErrorString(self, _: object) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"an illegal memory access was encountered"

    def _cuInit(self, flags: int) -> tuple[()]:  # noqa: N802
        assert flags == 0
        return ()

    def _cuCtxGetDevice(self) -> tuple[int]:  # noqa: N802
        return (0,)

    def _cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int]:  # noqa: N802
        assert device == 0
        return (attribute,)

    def _cuLibraryLoadData(self, code: bytes, *_: object) -> tuple[int]:  # noqa: N802
        self.loaded.append(code)
        return (len(self.loaded),)

    def _cuLibraryGetKernel(self, library: int, name: bytes) -> tuple[int]:  # noqa: N802
        assert f".entry {name.decode()}(".encode() in self.loaded[library - 1]
        return (library,)

    def _cuLaunchKernel(self, *args: Any) -> tuple[()]:  # noqa: N802
        *self_args, arguments, extra = args
        assert extra == 0
        address = ctypes.c_void_p.from_address(arguments).value
        assert address is not None
        self.groups.append(Group.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(Group))))
        self.launched.append(tuple(self_args))
        return ()


class Status(int):
    """A `CUresult`."""

    name = "CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.fixture
def driver(kept: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver in the place of NVIDIA's."""
    fake, real = Driver(), cuda_library.bindings

    def bindings(name: str) -> Any:
        return fake if name == "driver" else real(name)

    for module in (cuda_library, kernels):
        monkeypatch.setattr(module, "bindings", bindings)
    forget()
    yield fake
    forget()


def forget() -> None:
    for cached in ("_plan", "_function", "chip_of", "_start_driver"):
        getattr(kernels, cached).cache_clear()


def test_a_call_is_launched_as_planned(driver: Driver) -> None:
    Kernels().launch(SHAPE, BUFFERS, 77)
    (planned,) = plan_launches(SHAPE, Chip((9, 0), 132))
    expected = ("kernel 1", *planned.grid, 256, 1, 1, planned.shared_bytes, 77)
    assert driver.launched == [expected]
    assert bytes(driver.groups[0]) == bytes(group_of(SHAPE, BUFFERS, planned.splits))
    assert b".target sm_90" in driver.loaded[0]


def test_a_pair_is_launched_in_order_with_one_argument(driver: Driver) -> None:
    driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 8
    Kernels().launch(SHAPE, BUFFERS, 0)
    shrink, expand = plan_launches(SHAPE, Chip((8, 0), 132))
    assert [launch[:4] for launch in driver.launched] == [
        ("kernel 1", *shrink.grid),
        ("kernel 2", *expand.grid),
    ]
    assert bytes(driver.groups[0]) == bytes(driver.groups[1])
    assert all(b".target sm_80" in code for code in driver.loaded)


def test_a_kernel_is_loaded_once(driver: Driver) -> None:
    for m in (2, 2, 3):
        Kernels().launch(replace(SHAPE, m=m), BUFFERS, 0)
    assert (len(driver.loaded), len(driver.launched)) == (1, 3)


def test_a_refused_launch_has_nvidias_words(driver: Driver) -> None:
    Kernels().launch(SHAPE, BUFFERS, 0)
    driver.status = 700
    with pytest.raises(BackendError, match=r"an illegal memory access .*\(CUDA_ERROR_ILLEGAL_ADD"):
        Kernels().launch(SHAPE, BUFFERS, 0)
