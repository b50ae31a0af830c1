"""LoRAManager in threads: a load does not hold up those that serve, and none sees half of it."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters.manager_setup import BINDINGS, MANIFEST, manager_with, pair, refreshed
from support.fakes.fake_engine import FakeExecutor, FakeExecutorWithMemory, FakeMemory, make_weights

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import HostMemory, Stream
from trt_lora.runtime.memory.tensor import Tensor
from trt_lora.runtime.store.store import AdapterStore

SECONDS = 30  # until a thread that waits gives up, and the test fails


class SlowMemory(HostMemory):
    """An upload that waits until it is allowed, once it is told to be slow."""

    def __init__(self) -> None:
        self.slow, self.begun, self.allowed = False, Event(), Event()

    def upload(self, tensors: Mapping[str, Tensor], stream: Stream = None) -> dict[str, Tensor]:
        if self.slow:
            self.begun.set()
            assert self.allowed.wait(SECONDS)
        return super().upload(tensors, stream)


def everywhere(value: float) -> dict[str, Array]:
    """One value in every weight of every site."""
    return {name: np.full_like(array, value) for name, array in make_weights(MANIFEST).items()}


def values_of(manager: LoRAManager) -> set[float]:
    return {float(x) for tensor in refreshed(manager).values() for x in np.unique(tensor.numpy())}


def while_loading(
    load: Callable[[LoRAManager], object], check: Callable[[LoRAManager], None]
) -> LoRAManager:
    """Check in this thread while another one is in the middle of a load."""
    memory, manager = SlowMemory(), LoRAManager()
    manager.initialize_engine_bindings(FakeExecutor(MANIFEST, memory))
    manager.add_weights("a", everywhere(1))
    manager.add_weights("b", everywhere(2))
    memory.slow = True
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, manager)
        try:
            assert memory.begun.wait(SECONDS)
            memory.slow = False
            check(manager)
        finally:
            memory.allowed.set()
        loading.result(SECONDS)
    return manager


def test_adapters_are_switched_bound_and_unloaded_while_another_is_loaded() -> None:
    def serve(manager: LoRAManager) -> None:
        for name, scale, value in (("a", 1.0, 1), ("b", 1.0, 2), ("b", 0.5, 2), ("a", 1.0, 1)):
            manager.switch_weights(name, scale)
            assert values_of(manager) == {value, scale * value}
        manager.unload("b")
        assert manager.get_adapter_names() == ["a"]
        manager.reset_weights()
        assert values_of(manager) == {0}

    manager = while_loading(lambda manager: manager.add_weights("c", everywhere(3)), serve)
    assert manager.get_adapter_names() == ["a", "c"]


def test_a_replacement_takes_the_strength_of_the_moment_when_it_is_there() -> None:
    def serve(manager: LoRAManager) -> None:
        manager.switch_weights("a", 0.5)
        assert values_of(manager) == {1, 0.5}

    manager = while_loading(
        lambda manager: manager.add_weights("a", everywhere(4), replace=True), serve
    )
    assert (manager.get_active_adapter_name(), manager.active_scale) == ("a", 0.5)
    assert values_of(manager) == {4, 2}


def test_of_two_loads_under_one_name_the_second_to_end_is_refused() -> None:
    def serve(manager: LoRAManager) -> None:
        manager.add_weights("c", everywhere(5))
        manager.switch_weights("c")

    with pytest.raises(AdapterError, match="'c' is loaded already"):
        while_loading(lambda manager: manager.add_weights("c", everywhere(3)), serve)


def test_an_adapter_that_is_read_while_an_engine_is_bound_is_fitted_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(pair(), tmp_path / "a.safetensors")
    manager, read = LoRAManager(), Adapter.in_memory

    def bind_meanwhile(adapter: Adapter) -> Adapter:
        manager.initialize_engine_bindings(FakeExecutorWithMemory(MANIFEST))
        return read(adapter)

    monkeypatch.setattr(Adapter, "in_memory", bind_meanwhile)
    assert manager.load_weights("a", tmp_path / "a.safetensors") is not None
    manager.switch_weights("a")
    assert list(refreshed(manager)) == BINDINGS
    assert {tensor.device for tensor in refreshed(manager).values()} == {FakeMemory.device}


def test_an_adapter_that_is_unloaded_while_bindings_are_listed_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, ask = manager_with(a=pair(), b=everywhere(1)), AdapterStore.get_coverage

    def unload_meanwhile(store: AdapterStore, name: str) -> Coverage:
        if name == "a":
            manager.unload("b")
        return ask(store, name)

    monkeypatch.setattr(AdapterStore, "get_coverage", unload_meanwhile)
    assert set(manager.get_binding_names()) == pair().keys()


def test_a_map_never_has_half_of_an_adapter() -> None:
    """One thread replaces, unloads and adds; another switches and looks at what it is bound to."""
    manager = manager_with(a=everywhere(1), b=everywhere(2))
    stop = Event()

    def change() -> int:
        count = 0
        while not stop.is_set():
            count += 1
            manager.add_weights("a", everywhere(count), replace=True)
            manager.add_weights("c", everywhere(3))
            manager.blend("c", {"a": 1, "b": 1}, replace=True)
            manager.unload("c", force=True)
        return count

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            for i in range(300):
                scale = (1.0, 0.5, 2.0)[i % 3]
                manager.switch_weights("ab"[i % 2], scale)
                values = sorted(values_of(manager))
                assert values == sorted({values[-1], values[-1] * min(scale, 1 / scale)})
                assert manager.get_adapter_names()[:2] == ["a", "b"]
                assert manager.get_binding_names()[: len(BINDINGS)] == BINDINGS
        finally:
            stop.set()
        assert changing.result(SECONDS) > 1
