"""The adapter cache: budgets in bytes, pins, leases, versions, and what is read again."""

import gc
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier, Thread
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.fakes.adapter_files import MANIFEST, NBYTES, RANK, SLOTS, A, adapter_files, stacks_of
from support.fakes.fake_engine import FakeExecutor, make_weights

from trt_lora.plugins.errors import (
    AdapterError,
    ConfigError,
    EvictedAdapterError,
    StateError,
    UnknownAdapterError,
)
from trt_lora.runtime import Adapter, load_adapter
from trt_lora.runtime.adapters.cast import Caster, Conversion
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.slot_stacks import slot_nbytes
from trt_lora.runtime.store.source import Fit
from trt_lora.runtime.store.store import AdapterStore


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Five adapters of one size."""
    return adapter_files(tmp_path, "abcde")


@pytest.fixture
def cache() -> Iterator[AdapterStore]:
    """Room for three adapters on the host and two in slots; at the end everything adds up."""
    config = StoreConfig(host_memory=3 * NBYTES + NBYTES // 2)
    adapters = AdapterStore(FakeExecutor(MANIFEST), config)
    yield adapters
    adapters.close()
    adapters.check_integrity()


def test_the_least_recently_used_leaves_the_host_and_is_read_again(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    for name in "abc":
        cache.load(name, files[name])
    cache.bindings.activate("a")
    cache.load("d", files["d"])
    assert [cache.info(name).is_loaded for name in "abcd"] == [True, False, True, True]
    assert cache.stats.memory_bytes == 3 * NBYTES
    cache.bindings.rows(["b"])  # from disk; c leaves
    assert [cache.info(name).is_loaded for name in "abcd"] == [True, True, False, True]
    stack = stacks_of(cache).views(cache.bindings.slots["b"], 1)[A].numpy()[0]
    assert np.array_equal(stack[:, :RANK], load_file(files["b"])[A])
    stats = cache.stats
    assert (stats.reads, stats.evictions_from_memory, stats.registered) == (5, 2, 4)


def test_an_adapter_that_leaves_the_host_leaves_its_slot(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    cache.load("a", files["a"])
    cache.bindings.activate("a")
    for name in "bcd":
        cache.load(name, files[name])
    assert cache.bindings.slots == {}
    assert not cache.info("a").is_loaded
    assert cache.bindings.activate("a") == 0


def test_one_that_is_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    save_file(make_weights(MANIFEST, rank=16), tmp_path / "x.safetensors")
    adapters = AdapterStore(FakeExecutor(MANIFEST), StoreConfig(host_memory=1000))
    with pytest.raises(StateError, match=r"'x' takes 3,584 bytes, .* adapters is 1,000; give"):
        adapters.load("x", tmp_path / "x.safetensors")
    assert adapters.names == ()
    adapters.check_integrity()


def test_where_everything_is_held_the_error_names_who_holds_what(files: dict[str, Path]) -> None:
    config = StoreConfig(host_memory=2 * NBYTES)
    adapters = AdapterStore(FakeExecutor(MANIFEST), config)
    for name in "ab":
        adapters.load(name, files[name])
    leases = [adapters.lease("a"), adapters.lease("a")]
    adapters.pin("b")
    held = r"held by 'a' \(2 sequences\), 'b' \(pinned\); release or unpin"
    with pytest.raises(StateError, match=held):
        adapters.load("c", files["c"])
    adapters.register("c", files["c"])
    with pytest.raises(StateError, match=r"2 slots in use by 'a' \(2 seq.*, 'b' \(pinned\)"):
        adapters.lease("c")
    adapters.unpin("b")
    leases.append(adapters.lease("c"))  # b leaves both levels
    assert adapters.bindings.slots == {}
    for lease in leases:
        adapters.release(lease)
    adapters.check_integrity()


def test_a_pinned_adapter_is_in_a_slot_and_stays_there(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    for name in "abc":
        cache.load(name, files[name])
    cache.pin("a")
    cache.pin("a")
    for name in "bcbc":
        cache.bindings.activate(name)
    assert cache.bindings.slots.keys() == {"a", "c"}
    cache.unpin("a")
    cache.bindings.activate("b")
    assert cache.bindings.slots.keys() == {"b", "c"}


def test_memory_of_an_unloaded_adapter_is_free_at_its_last_lease(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    cache.load("a", files["a"])
    leases = [cache.lease("a"), cache.lease("a")]
    slot = cache.bindings.activate(leases[0])
    assert slot is not None
    cache.unload("a")
    with pytest.raises(UnknownAdapterError, match="unknown adapter 'a'; loaded: none"):
        cache.lease("a")
    assert cache.bindings.rows(leases)["lora_slot"].numpy().tolist() == [0, 0]
    cache.release(leases[0])
    assert cache.stats.memory_bytes == NBYTES
    assert stacks_of(cache).views(slot, 1)[A].numpy().any()
    cache.release(leases[1])
    assert (cache.stats.memory_bytes, cache.stats.in_slots) == (0, 0)
    assert not stacks_of(cache).views(slot, 1)[A].numpy().any()


def test_a_name_means_the_new_version_and_a_lease_the_old_one(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    cache.load("a", files["a"])
    old = cache.lease("a")
    first = cache.info("a").version
    cache.load("a", files["b"], replace=True)
    new = cache.lease("a")
    assert (old.version, new.version) == (first, cache.info("a").version)
    assert old.version != new.version
    assert old.key != new.key
    step = cache.bindings.rows([old, new, "a"])
    assert step["lora_slot"].numpy().tolist() == [0, 1, 1]
    for stack, name in zip(step[A].numpy(), "ab", strict=True):
        assert np.array_equal(stack[:, :RANK], load_file(files[name])[A])
    cache.release(old)
    assert cache.stats.memory_bytes == NBYTES
    cache.release(new)


def test_equal_weights_have_one_hash_and_different_versions(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    for name in "ab":
        cache.load(name, files["a"])
    assert cache.info("a").content_hash == cache.info("b").content_hash
    assert cache.info("a").version != cache.info("b").version
    cache.register("c", files["c"])
    assert cache.info("c").content_hash == ""  # it was not read
    lease = cache.lease("c")
    assert lease.content_hash == cache.info("c").content_hash != cache.info("a").content_hash
    cache.release(lease)


def test_replacing_compares_and_swaps(cache: AdapterStore, files: dict[str, Path]) -> None:
    cache.load("a", files["a"], expected_version=0)
    seen = cache.info("a").version
    cache.load("a", files["b"], expected_version=seen)
    with pytest.raises(StateError, match=r"at version \d, expected \d: it was replaced"):
        cache.load("a", files["c"], expected_version=seen)
    for call in (cache.unload, cache.lease):
        with pytest.raises(StateError, match=f"expected {seen}"):
            call("a", expected_version=seen)
    with pytest.raises(AdapterError, match="loaded already; choose another name, unload it first"):
        cache.load("a", files["c"])
    cache.unload("a", expected_version=cache.info("a").version)
    with pytest.raises(StateError, match=f"at version 0, expected {seen}"):
        cache.load("a", files["a"], expected_version=seen)


def test_a_load_that_fails_leaves_the_name_and_the_bytes_as_they_were(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    cache.load("a", files["a"])
    before = cache.stats, cache.info("a").version
    weights = make_weights(MANIFEST, rank=RANK)
    weights[A][0, 0] = np.nan
    save_file(weights, files["b"])
    with pytest.raises(AdapterError, match="NaN"):
        cache.load("a", files["b"], replace=True)
    assert (cache.stats, cache.info("a").version) == before


def test_the_error_of_a_load_keeps_nothing_that_was_read(
    cache: AdapterStore, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[ReferenceType[Caster]]()
    write = Caster.write

    def noted(self: Caster, *args: Any) -> Conversion:
        made.append(ref(self))
        return write(self, *args)

    monkeypatch.setattr(Caster, "write", noted)
    save_file({n: w * np.nan for n, w in make_weights(MANIFEST, rank=RANK).items()}, files["b"])
    gc.disable()
    try:
        with pytest.raises(AdapterError, match="NaN"):
            cache.load("b", files["b"])
        assert made
        assert [caster() for caster in made] == [None] * len(made)
    finally:
        gc.enable()


def test_an_adapter_whose_files_changed_is_not_read_again(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    for name in "abcd":
        cache.load(name, files[name])
    save_file(make_weights(MANIFEST, rank=RANK, seed=99), files["a"])
    with pytest.raises(AdapterError, match="changed since it was loaded as adapter 'a', ver"):
        cache.lease("a")
    with pytest.raises(AdapterError, match="changed since"):
        cache.prefetch("a").result()
    cache.load("a", files["a"], replace=True)
    cache.release(cache.lease("a"))


def test_weights_from_memory_must_be_sent_again_once_evicted(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    for name in "abcd":
        cache.add(name, load_adapter(files[name]))
    with pytest.raises(EvictedAdapterError, match=r"'a' was evicted.*; send them again"):
        cache.lease("a")
    assert cache.names == ("b", "c", "d")
    cache.add("a", load_adapter(files["a"]))
    cache.release(cache.lease("a"))


def test_a_registered_adapter_is_checked_now_and_read_when_wanted(
    cache: AdapterStore, files: dict[str, Path], tmp_path: Path
) -> None:
    coverage = cache.register("a", files["a"])
    assert len(coverage.sites) == len(MANIFEST.sites)
    assert cache.stats.memory_bytes == cache.stats.reads == 0
    assert not cache.can_lease("a")
    assert cache.get_coverage("a").bindings == coverage.bindings
    cache.prefetch("a").result()
    assert cache.can_lease("a")
    assert cache.bindings.slots == {"a": 0}
    save_file(make_weights(MANIFEST, rank=17), tmp_path / "large.safetensors")
    with pytest.raises(AdapterError, match="has rank 17"):
        cache.register("x", tmp_path / "large.safetensors")


def test_a_prefetch_takes_no_slot_that_is_held(cache: AdapterStore, files: dict[str, Path]) -> None:
    for name in "abc":
        cache.register(name, files[name])
    leases = [cache.lease(name) for name in "ab"]
    cache.bindings.rows(leases)
    cache.prefetch("c").result()
    assert cache.info("c").is_loaded
    assert not cache.can_lease("c")
    assert cache.bindings.slots.keys() == {"a", "b"}
    for lease in leases:
        cache.release(lease)


def test_a_lease_is_released_once_and_then_worth_nothing(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    cache.load("a", files["a"])
    lease = cache.lease("a")
    cache.release(lease)
    with pytest.raises(StateError, match="'a' was released already"):
        cache.release(lease)
    with pytest.raises(StateError, match="'a' was released"):
        cache.bindings.rows([lease])


def test_the_same_rows_are_the_same_object(cache: AdapterStore, files: dict[str, Path]) -> None:
    for name in "ab":
        cache.load(name, files[name])
    first = cache.bindings.rows(["a", "b", None])
    assert cache.bindings.rows(["a", "b", None]) is first
    assert cache.bindings.rows(["b", "a", None]) is not first


def test_a_share_of_the_devices_memory_makes_fewer_slots() -> None:
    one = slot_nbytes(MANIFEST)
    adapters = AdapterStore(FakeExecutor(MANIFEST), StoreConfig(device_memory=one + one // 2))
    assert stacks_of(adapters).slots == adapters.stats.slots == 1
    executor = FakeExecutor(MANIFEST)
    executor.memory.free_bytes = lambda: 3 * one
    assert AdapterStore(executor, StoreConfig(device_memory=0.9)).stats.slots == SLOTS
    assert AdapterStore(executor, StoreConfig(device_memory=0.5)).stats.slots == 1
    with pytest.raises(ConfigError, match=r"device_memory is 0.1, .* one slot .* takes"):
        AdapterStore(executor, StoreConfig(device_memory=0.1))


@pytest.mark.parametrize("limit", [0, -1, 0.0, 1.5, True, "1GB", float("nan")])
def test_a_limit_that_is_none_is_refused(limit: object) -> None:
    for name in ("host_memory", "device_memory"):
        with pytest.raises(ConfigError, match=f"{name} is .*; give a number of bytes"):
            StoreConfig(**{name: limit})  # type: ignore[arg-type]


def test_what_is_replaced_again_and_again_is_in_memory_once(
    cache: AdapterStore, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = list[ReferenceType[Fitted]]()
    read = Fit.read

    def watched(fit: Fit, adapter: Adapter, *, strict: bool) -> Fitted:
        found = read(fit, adapter, strict=strict)
        fitted.append(ref(found))
        return found

    monkeypatch.setattr(Fit, "read", watched)
    cache.load("a", files["a"])
    for turn in range(50):
        cache.load("a", files["ab"[turn % 2]], replace=True)
        cache.bindings.activate("a")
    gc.collect()
    assert [made() is not None for made in fitted] == [False] * 50 + [True]
    assert (cache.stats.memory_bytes, cache.stats.in_slots) == (NBYTES, 1)


def test_threads_that_want_one_adapter_read_it_once(
    cache: AdapterStore, files: dict[str, Path]
) -> None:
    cache.register("a", files["a"])
    start, slots = Barrier(8), list[int | None]()

    def want() -> None:
        start.wait()
        lease = cache.lease("a")
        slots.append(cache.bindings.activate(lease))
        cache.release(lease)

    threads = [Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert slots == [0] * 8
    assert (cache.stats.reads, cache.stats.copies) == (1, 1)
