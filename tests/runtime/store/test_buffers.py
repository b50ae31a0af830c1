"""Adapters of an engine for one at a time: what a run binds, and the LRU of its device's memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.fakes.adapter_files import NBYTES, A, adapter_files
from support.fakes.fake_engine import FakeExecutor, FakeExecutorWithMemory, make_manifest

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.store import AdapterStore

MANIFEST = make_manifest()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return adapter_files(tmp_path, "abcd")


@pytest.fixture
def store(files: dict[str, Path]) -> Iterator[AdapterStore]:
    """Room for two adapters, of which four are registered."""
    config = StoreConfig(device_memory=2 * NBYTES + NBYTES // 2)
    made = AdapterStore(FakeExecutor(MANIFEST), config)
    for name, path in files.items():
        made.register(name, path)
    yield made
    made.close()
    made.check_integrity()


def test_rows_of_one_adapter_bind_its_own_tensors_and_the_base_model_dummies(
    store: AdapterStore, files: dict[str, Path]
) -> None:
    base, bound = store.bindings.rows([None, None]), store.bindings.rows(["a", "a"])
    assert base.keys() == bound.keys() == MANIFEST.lora_inputs
    assert base[A].shape == (8, 1)
    np.testing.assert_array_equal(bound[A].numpy(), load_file(files["a"])[A])
    assert store.bindings.rows(["a"]) is bound
    assert store.bindings.rows([None]) is base


def test_rows_of_several_adapters_are_a_group_each(store: AdapterStore) -> None:
    adapters = ["a", None, "b", "a", None]
    assert store.bindings.groups(adapters) == [[0, 3], [1, 4], [2]]
    with pytest.raises(StateError, match=r"3 adapters in one run, .* one at a time; run each of"):
        store.bindings.rows(adapters)


def test_the_least_recently_used_leaves_the_devices_memory_and_is_read_again(
    store: AdapterStore,
) -> None:
    for name in "abac":
        store.bindings.activate(name)
    assert store.bindings.resident == {"a", "c"}
    assert store.bindings.slots == {}
    assert store.bindings.slot_count is None
    store.bindings.rows(["b"])
    assert store.bindings.resident == {"b", "c"}
    stats = store.stats
    assert (stats.reads, stats.evictions_from_memory, stats.memory_bytes) == (4, 2, 2 * NBYTES)


def test_what_is_leased_or_pinned_stays(store: AdapterStore) -> None:
    lease = store.lease("a")
    store.pin("b")
    with pytest.raises(StateError, match=r"held by 'a' \(1 sequence\), 'b' \(pinned\).*device_mem"):
        store.lease("c")
    store.release(lease)
    store.release(store.lease("c"))
    assert store.bindings.resident == {"b", "c"}


def test_adapters_lie_in_the_memory_of_the_engine_alone(files: dict[str, Path]) -> None:
    executor = FakeExecutorWithMemory(MANIFEST)
    store = AdapterStore(executor)
    store.load("a", files["a"], stream=7)
    assert [stream for _, stream in executor.memory.uploads] == [7]
    lease = store.lease("a")
    tensors = lease.loaded.fitted.tensors
    assert {tensor.device for tensor in tensors.values()} == {executor.memory.device}
    assert store.bindings.rows([lease])[A] is tensors[A]
    store.release(lease)


def test_a_prefetch_brings_an_adapter_to_where_a_run_binds_it(store: AdapterStore) -> None:
    assert not store.can_lease("a")
    store.prefetch("a").result()
    assert store.can_lease("a")
    assert store.info("a").is_resident
