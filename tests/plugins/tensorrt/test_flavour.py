"""TensorRT and TensorRT-RTX: found without an import, loaded when asked, explained when missing."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.tensorrt.flavour import (
    FLAVOURS,
    TENSORRT,
    TENSORRT_RTX,
    Flavour,
    flavour_named,
    installed_flavour,
)

ABSENT = Flavour("absent", "no_such_module_of_trt_lora", extra="rtx", has_timing_cache=False)


def install(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let exactly these modules be found."""

    def find_spec(name: str) -> object:
        return object() if name in modules else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize("expected", FLAVOURS)
def test_a_flavour_is_found_by_its_name(expected: Flavour) -> None:
    assert flavour_named(expected.name) is expected


@pytest.mark.parametrize("name", ["", "tensorrt_rtx", "TensorRT", "cuda"])
def test_an_unknown_flavour_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(BackendError, match=r"choose from: tensorrt, tensorrt-rtx") as caught:
        flavour_named(name)
    assert repr(name) in str(caught.value)


def test_only_full_tensorrt_has_a_timing_cache() -> None:
    assert [f.name for f in FLAVOURS if f.has_timing_cache] == ["tensorrt"]


def test_a_module_that_is_not_there_is_not_installed() -> None:
    assert not ABSENT.installed


def test_asking_whether_a_flavour_is_installed_imports_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str) -> ModuleType:
        raise AssertionError(f"imported {name}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    before = set(sys.modules)
    found = [f.installed for f in FLAVOURS]
    assert found == [importlib.util.find_spec(f.module) is not None for f in FLAVOURS]
    assert not {"tensorrt", "tensorrt_rtx"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ((), None),
        (("tensorrt_rtx",), TENSORRT_RTX),
        (("tensorrt",), TENSORRT),
        (("tensorrt_rtx", "tensorrt"), TENSORRT),
    ],
)
def test_full_tensorrt_comes_before_rtx_where_both_are_installed(
    monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], expected: Flavour | None
) -> None:
    install(monkeypatch, *modules)
    assert installed_flavour() is expected


def test_tensorrt_rtx_alone_refuses_a_gpu_of_a_data_centre() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    obstacle = TENSORRT_RTX.gpu_obstacle("9.0")
    assert "7.5, 8.0, 8.6, 8.9, 12.0, 12.1, and this one has 9.0" in obstacle
    assert not TENSORRT_RTX.gpu_obstacle("8.9")
    full = Flavour("tensorrt", "math", extra="tensorrt", has_timing_cache=True)
    assert not full.gpu_obstacle("9.0")


def test_loading_returns_the_module() -> None:
    assert Flavour("json", "json", extra="", has_timing_cache=False).load() is sys.modules["json"]


def test_loading_a_missing_library_says_what_to_install() -> None:
    with pytest.raises(BackendError, match=r"pip install 'trt-lora\[rtx\]'") as caught:
        ABSENT.load()
    assert "absent cannot be imported" in str(caught.value)
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize("error", [OSError("libcudart.so"), RuntimeError("no driver")])
def test_a_library_that_fails_to_load_is_reported_with_its_own_words(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(BackendError, match=str(error)):
        TENSORRT.load()
