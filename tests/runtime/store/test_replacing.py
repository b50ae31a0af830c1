"""Adapters that take the place of others: all of it happens, or nothing, and nobody is lost."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event, Thread, Timer
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.deferred_executor import DeferredExecutor
from support.fakes.adapter_files import MANIFEST, NBYTES, RANK, SLOTS, A, adapter_files, stacks_of
from support.fakes.fake_engine import FakeExecutor, make_weights

from trt_lora.plugins.errors import AdapterError, EvictedAdapterError, LoRAError, StateError
from trt_lora.runtime import Adapter, load_adapter
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.source import Fit
from trt_lora.runtime.store.store import AdapterStore


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return adapter_files(tmp_path, "abcdef")


def room_for(count: int, slots: int = SLOTS) -> AdapterStore:
    """A cache with room for so many adapters on the host."""
    executor = FakeExecutor(replace(MANIFEST, max_loras=slots))
    return AdapterStore(executor, StoreConfig(host_memory=count * NBYTES + NBYTES // 2))


Load = Callable[..., Any]


def loads_of(cache: AdapterStore, path: Path) -> dict[str, Load]:
    """The ways to bring an adapter in."""
    return {
        "add": lambda name, **how: cache.add(name, load_adapter(path), **how),
        "load": lambda name, **how: cache.load(name, path, **how),
    }


@pytest.mark.parametrize("first", ["add", "load"])
@pytest.mark.parametrize("second", ["add", "load"])
@pytest.mark.parametrize("by", ["replace", "expected_version"])
def test_an_adapter_is_replaced_where_there_is_room_for_one_alone(
    files: dict[str, Path], first: str, second: str, by: str
) -> None:
    cache = room_for(1)
    loads_of(cache, files["a"])[first]("x")
    how = {"replace": True} if by == "replace" else {"expected_version": cache.info("x").version}
    loads_of(cache, files["b"])[second]("x", **how)
    cache.check_integrity()
    assert (cache.names, cache.stats.in_memory, cache.stats.memory_bytes) == (("x",), 1, NBYTES)
    stack = cache.bindings.rows(["x"])[A].numpy()[0]
    assert np.array_equal(stack[:, :RANK], load_file(files["b"])[A])


@pytest.mark.parametrize("way", ["add", "load"])
def test_nobody_else_is_evicted_for_what_is_replaced(files: dict[str, Path], way: str) -> None:
    cache = room_for(2)
    cache.load("y", files["c"])
    cache.load("x", files["a"])
    loads_of(cache, files["b"])[way]("x", replace=True)
    assert cache.info("y").is_loaded
    assert cache.stats.evictions_from_memory == 0


@pytest.mark.parametrize("way", ["add", "load"])
def test_a_pinned_adapter_is_replaced_where_there_is_room_for_one_alone(
    files: dict[str, Path], way: str
) -> None:
    cache = room_for(1)
    cache.load("x", files["a"])
    cache.pin("x", allow_last=True)
    loads_of(cache, files["b"])[way]("x", replace=True)
    cache.check_integrity()
    assert cache.bindings.slots.keys() == {"x"}


def test_an_adapter_whose_room_is_taken_while_it_is_read_is_refused(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = room_for(1)
    cache.add("x", load_adapter(files["a"]))
    read, leases = Fit.read, list[Lease]()

    def meanwhile(fit: Fit, adapter: Adapter, *, strict: bool) -> Fitted:
        leases.append(cache.lease("x"))
        return read(fit, adapter, strict=strict)

    monkeypatch.setattr(Fit, "read", meanwhile)
    with pytest.raises(StateError, match=r"held by 'x' \(1 sequence\)"):
        cache.load("y", files["b"])
    assert (cache.names, cache.stats.memory_bytes) == (("x",), NBYTES)
    cache.check_integrity()
    cache.release(leases[0])


@pytest.mark.parametrize("kind", ["damaged", "gone", "other base", "too large"])
def test_a_replacement_that_fails_has_evicted_nobody(
    files: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    cache = room_for(2)
    for name in "xy":
        cache.add(name, load_adapter(files["a"]))
    before = cache.stats, cache.info("x").version, cache.names
    bad = tmp_path / "bad.safetensors"
    weights = make_weights(MANIFEST, rank=3 * RANK if kind == "too large" else RANK)
    if kind == "damaged":
        weights[A][-1, -1] = np.nan
    if kind == "other base":
        weights = {name: w[:-1] for name, w in weights.items()}
    if kind != "gone":
        save_file(weights, bad)
    for name, how in (("x", {"replace": True}), ("new", {})):
        with pytest.raises(LoRAError):
            cache.load(name, bad, **how)
        cache.check_integrity()
        assert (cache.stats, cache.info("x").version, cache.names) == before
    for name in "xy":
        cache.release(cache.lease(name))


def test_a_name_that_is_taken_while_its_adapter_is_read_keeps_what_it_means(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = room_for(2)
    cache.add("x", load_adapter(files["a"]))
    seen = cache.info("x").version
    read = Fit.read

    def meanwhile(fit: Fit, adapter: Adapter, *, strict: bool) -> Fitted:
        monkeypatch.undo()
        cache.add("x", load_adapter(files["b"]), replace=True)
        return read(fit, adapter, strict=strict)

    monkeypatch.setattr(Fit, "read", meanwhile)
    with pytest.raises(StateError, match=f"expected {seen}: it was replaced"):
        cache.load("x", files["c"], expected_version=seen)
    cache.check_integrity()
    assert cache.stats.in_memory == 1
    stack = cache.bindings.rows(["x"])[A].numpy()[0]
    assert np.array_equal(stack[:, :RANK], load_file(files["b"])[A])


# ---------------------------------------------------------------------------------------- pins


@pytest.mark.parametrize("way", ["add", "load"])
def test_a_pin_stays_with_the_name_when_its_adapter_is_replaced(
    files: dict[str, Path], way: str
) -> None:
    cache = room_for(5)
    cache.load("x", files["a"])
    cache.pin("x", allow_last=True)
    loads_of(cache, files["b"])[way]("x", replace=True)
    assert (cache.stats.pinned, list(cache.bindings.slots)) == (1, ["x"])
    for name in "cdef":
        cache.load(name, files[name])
        cache.bindings.activate(name)
    assert "x" in cache.bindings.slots
    stack = cache.bindings.rows(["x"])[A].numpy()[0]
    assert np.array_equal(stack[:, :RANK], load_file(files["b"])[A])
    cache.unpin("x")
    for name in "cd":
        cache.bindings.activate(name)
    assert "x" not in cache.bindings.slots
    cache.check_integrity()


def test_a_pinned_adapter_in_use_is_replaced_where_another_slot_is_free(
    files: dict[str, Path],
) -> None:
    cache = room_for(5)
    cache.load("x", files["a"])
    cache.pin("x", allow_last=True)
    lease = cache.lease("x")
    cache.load("x", files["b"], replace=True)
    assert (cache.stats.pinned, cache.stats.leased) == (1, 1)
    cache.check_integrity()
    cache.release(lease)
    assert cache.bindings.slots.keys() == {"x"}
    cache.check_integrity()


def test_a_pin_that_finds_no_slot_is_a_replacement_that_fails(files: dict[str, Path]) -> None:
    cache = room_for(5, slots=1)
    cache.load("x", files["a"])
    cache.pin("x", allow_last=True)
    lease = cache.lease("x")
    before = cache.stats, cache.info("x").version
    with pytest.raises(StateError, match=r"finds all 1 slots in use by 'x' \(1 sequence, pinned\)"):
        cache.load("x", files["b"], replace=True)
    after = cache.stats
    assert (replace(after, reads=before[0].reads), cache.info("x").version) == before
    cache.check_integrity()
    cache.release(lease)


# -------------------------------------------------------------------------------- registration


def test_a_registered_adapter_that_was_rewritten_before_its_first_read_is_refused(
    files: dict[str, Path],
) -> None:
    cache = room_for(3)
    cache.register("x", files["a"])
    save_file({n: w * 3 for n, w in load_file(files["a"]).items()}, files["a"])
    for _ in range(2):
        with pytest.raises(AdapterError, match="changed since it was registered; load it"):
            cache.lease("x")
    cache.load("x", files["a"], replace=True)
    cache.release(cache.lease("x"))
    cache.check_integrity()


def test_a_registered_adapter_that_was_copied_over_itself_is_the_same(
    files: dict[str, Path],
) -> None:
    cache = room_for(3)
    cache.register("x", files["a"])
    data = files["a"].read_bytes()
    files["a"].unlink()
    files["a"].write_bytes(data)
    cache.release(cache.lease("x"))


# ------------------------------------------------------------------------------------- evictions


def test_what_waits_to_be_prefetched_is_not_evicted_before_its_turn(
    files: dict[str, Path],
) -> None:
    cache = room_for(2)
    background = DeferredExecutor()
    cache._prefetcher._thread = background  # type: ignore[assignment]
    cache.add("x", load_adapter(files["a"]))
    for name in "bcdef":
        cache.register(name, files[name])
    futures = [cache.prefetch(name) for name in "bcdefx"]
    background.run()
    assert all(future.done() for future in futures)
    assert futures[-1].exception() is None
    assert "x" in cache.bindings.slots
    cache.check_integrity()


def test_who_waits_to_be_prefetched_keeps_no_slot_from_those_before_it(
    files: dict[str, Path],
) -> None:
    cache = room_for(4)
    background = DeferredExecutor()
    cache._prefetcher._thread = background  # type: ignore[assignment]
    for name in "abc":
        cache.load(name, files[name])
    cache.bindings.activate("a")
    cache.pin("b", allow_last=True)
    futures = [cache.prefetch(name) for name in "ca"]  # c takes the slot of a, whose turn comes
    turns = Thread(target=background.run, daemon=True)
    turns.start()
    turns.join(20)
    assert [future.done() for future in futures] == [True, True]
    assert cache.bindings.slots.keys() == {"a", "b"}
    cache.check_integrity()


def test_a_cancelled_prefetch_lets_its_adapter_be_evicted(files: dict[str, Path]) -> None:
    cache = room_for(1)
    gate = Event()
    cache.register("f", files["f"])
    cache._prefetcher._load = lambda entry: gate.wait()  # type: ignore[method-assign, assignment]
    running = cache.prefetch("f")
    cache.add("x", load_adapter(files["a"]))
    waiting = cache.prefetch("x")
    Timer(0.05, gate.set).start()
    cache.close()
    assert running.done()
    assert waiting.cancelled()
    cache.add("y", load_adapter(files["b"]))
    assert cache.names == ("f", "y")
    cache.check_integrity()


def test_threads_that_have_looked_at_an_adapter_have_it(files: dict[str, Path]) -> None:
    """Others want its room between the look at its name and the copy."""
    cache = room_for(2)
    cache.add("x", load_adapter(files["a"]))
    gate, go = Barrier(3), cache._levels.to_device

    def gated(entry: Any) -> int | None:
        gate.wait(10)
        gate.wait(10)
        return go(entry)

    cache._levels.to_device = gated  # type: ignore[method-assign]
    found: list[int | None] = []
    threads = [Thread(target=lambda: found.append(cache.bindings.activate("x"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.wait(10)
    cache.load("b", files["b"])
    cache.load("c", files["c"])
    assert cache.info("x").is_loaded
    gate.wait(10)
    for thread in threads:
        thread.join(10)
    assert found == [0, 0]
    cache.check_integrity()


def test_an_evicted_adapter_that_somebody_still_has_is_an_error_and_no_hanging_thread(
    files: dict[str, Path],
) -> None:
    cache = room_for(1)
    cache.add("x", load_adapter(files["a"]))
    entry = cache._names.get("x")
    cache.add("y", load_adapter(files["b"]))
    for _ in range(2):
        with pytest.raises(EvictedAdapterError, match="'x' was evicted"):
            cache._levels.to_memory(entry)
    cache.check_integrity()


def test_what_steps_use_most_is_evicted_last(files: dict[str, Path]) -> None:
    cache = room_for(3)
    for name in "abc":
        cache.load(name, files[name])
        if name != "c":
            cache.bindings.activate(name)
    for _ in range(3):
        cache.bindings.rows(["a"])  # a was the first to come, and is the last one used
    cache.load("d", files["d"])
    assert [cache.info(name).is_loaded for name in "abcd"] == [True, False, True, True]
    for _ in range(3):
        cache.bindings.rows(["a"])
    cache.bindings.activate("c")
    cache.bindings.rows(["a"])
    cache.bindings.activate("d")
    assert cache.bindings.slots.keys() == {"a", "d"}


def test_what_another_thread_copies_is_not_evicted(files: dict[str, Path]) -> None:
    """Neither from the host nor from its slot."""
    cache = room_for(2, slots=1)
    for name in "ab":
        cache.load(name, files[name])
    copying, gate, place = Event(), Event(), stacks_of(cache).place

    def slow(slot: int, fitted: Any) -> None:
        copying.set()
        assert gate.wait(10)
        place(slot, fitted)

    stacks_of(cache).place = slow  # type: ignore[method-assign]
    first = Thread(target=cache.bindings.activate, args=("a",))
    first.start()
    assert copying.wait(10)
    cache.load("c", files["c"])  # b leaves, though a was used before it
    assert [cache.info(name).is_loaded for name in "abc"] == [True, False, True]
    second = Thread(target=cache.bindings.activate, args=("c",))
    second.start()
    time.sleep(0.02)
    assert cache.bindings.slots == {"a": 0}
    gate.set()
    for thread in (first, second):
        thread.join(10)
    assert cache.bindings.slots == {"c": 0}
    cache.check_integrity()
