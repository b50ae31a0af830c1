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
from support.fakes.adapter_files import MANIFEST, NBYTES, RANK, SLOTS, A, adapter_files
from support.fakes.fake_engine import FakeExecutor, make_weights

from trt_lora.plugins.errors import AdapterError, EvictedAdapterError, LoRAError, StateError
from trt_lora.runtime import Adapter, load_adapter
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.managers.slots.cache.adapter_source import AdapterSource
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.cache_config import CacheConfig
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return adapter_files(tmp_path, "abcdef")


def room_for(count: int, slots: int = SLOTS) -> SlotAdapters:
    """A cache with room for so many adapters on the host."""
    executor = FakeExecutor(replace(MANIFEST, max_loras=slots))
    return SlotAdapters(executor, CacheConfig(host_memory=count * NBYTES + NBYTES // 2))


Load = Callable[..., Any]


def loads_of(cache: SlotAdapters, path: Path) -> dict[str, Load]:
    """The ways to bring an adapter in."""
    return {
        "add": lambda name, **how: cache.add_adapter(name, load_adapter(path), **how),
        "load": lambda name, **how: cache.load_weights(name, path, **how),
    }


@pytest.mark.parametrize("first", ["add", "load"])
@pytest.mark.parametrize("second", ["add", "load"])
@pytest.mark.parametrize("by", ["replace", "expected_generation"])
def test_an_adapter_is_replaced_where_there_is_room_for_one_alone(
    files: dict[str, Path], first: str, second: str, by: str
) -> None:
    cache = room_for(1)
    loads_of(cache, files["a"])[first]("x")
    how = {"replace": True} if by == "replace" else {"expected_generation": cache.generation("x")}
    loads_of(cache, files["b"])[second]("x", **how)
    cache.check_integrity()
    assert (cache.names, cache.stats.on_host, cache.stats.host_bytes) == (("x",), 1, NBYTES)
    stack = cache.rows(["x"])[A].numpy()[0]
    assert np.array_equal(stack[:, :RANK], load_file(files["b"])[A])


@pytest.mark.parametrize("way", ["add", "load"])
def test_nobody_else_is_evicted_for_what_is_replaced(files: dict[str, Path], way: str) -> None:
    cache = room_for(2)
    cache.load_weights("y", files["c"])
    cache.load_weights("x", files["a"])
    loads_of(cache, files["b"])[way]("x", replace=True)
    assert cache.is_on_host("y")
    assert cache.stats.evictions_from_host == 0


@pytest.mark.parametrize("way", ["add", "load"])
def test_a_pinned_adapter_is_replaced_where_there_is_room_for_one_alone(
    files: dict[str, Path], way: str
) -> None:
    cache = room_for(1)
    cache.load_weights("x", files["a"])
    cache.pin("x", allow_last=True)
    loads_of(cache, files["b"])[way]("x", replace=True)
    cache.check_integrity()
    assert cache.slots.keys() == {"x"}


def test_an_adapter_whose_room_is_taken_while_it_is_read_is_refused(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = room_for(1)
    cache.add_adapter("x", load_adapter(files["a"]))
    read, leases = AdapterSource.read, list[Lease]()

    def meanwhile(source: AdapterSource, adapter: Adapter) -> Fitted:
        leases.append(cache.lease("x"))
        return read(source, adapter)

    monkeypatch.setattr(AdapterSource, "read", meanwhile)
    with pytest.raises(StateError, match=r"held by 'x' \(1 sequence\)"):
        cache.load_weights("y", files["b"])
    assert (cache.names, cache.stats.host_bytes) == (("x",), NBYTES)
    cache.check_integrity()
    cache.release(leases[0])


@pytest.mark.parametrize("kind", ["damaged", "gone", "other base", "too large"])
def test_a_replacement_that_fails_has_evicted_nobody(
    files: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    cache = room_for(2)
    for name in "xy":
        cache.add_adapter(name, load_adapter(files["a"]))
    before = cache.stats, cache.generation("x"), cache.names
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
            cache.load_weights(name, bad, **how)
        cache.check_integrity()
        assert (cache.stats, cache.generation("x"), cache.names) == before
    for name in "xy":
        cache.release(cache.lease(name))


def test_a_name_that_is_taken_while_its_adapter_is_read_keeps_what_it_means(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = room_for(2)
    cache.add_adapter("x", load_adapter(files["a"]))
    seen = cache.generation("x")
    read = type(cache)._entry

    def meanwhile(self: SlotAdapters, name: str, *rest: Any) -> Any:
        monkeypatch.undo()
        cache.add_adapter("x", load_adapter(files["b"]), replace=True)
        return read(self, name, *rest)

    monkeypatch.setattr(type(cache), "_entry", meanwhile)
    with pytest.raises(StateError, match=f"expected {seen}: somebody replaced"):
        cache.load_weights("x", files["c"], expected_generation=seen)
    cache.check_integrity()
    assert cache.stats.on_host == 1
    stack = cache.rows(["x"])[A].numpy()[0]
    assert np.array_equal(stack[:, :RANK], load_file(files["b"])[A])


# ---------------------------------------------------------------------------------------- pins


@pytest.mark.parametrize("way", ["add", "load"])
def test_a_pin_stays_with_the_name_when_its_adapter_is_replaced(
    files: dict[str, Path], way: str
) -> None:
    cache = room_for(5)
    cache.load_weights("x", files["a"])
    cache.pin("x", allow_last=True)
    loads_of(cache, files["b"])[way]("x", replace=True)
    assert (cache.stats.pinned, list(cache.slots)) == (1, ["x"])
    for name in "cdef":
        cache.load_weights(name, files[name])
        cache.activate(name)
    assert "x" in cache.slots
    stack = cache.rows(["x"])[A].numpy()[0]
    assert np.array_equal(stack[:, :RANK], load_file(files["b"])[A])
    cache.unpin("x")
    for name in "cd":
        cache.activate(name)
    assert "x" not in cache.slots
    cache.check_integrity()


def test_a_pinned_adapter_in_use_is_replaced_where_another_slot_is_free(
    files: dict[str, Path],
) -> None:
    cache = room_for(5)
    cache.load_weights("x", files["a"])
    cache.pin("x", allow_last=True)
    lease = cache.lease("x")
    cache.load_weights("x", files["b"], replace=True)
    assert (cache.stats.pinned, cache.stats.leased) == (1, 1)
    cache.check_integrity()
    cache.release(lease)
    assert cache.slots.keys() == {"x"}
    cache.check_integrity()


def test_a_pin_that_finds_no_slot_is_a_replacement_that_fails(files: dict[str, Path]) -> None:
    cache = room_for(5, slots=1)
    cache.load_weights("x", files["a"])
    cache.pin("x", allow_last=True)
    lease = cache.lease("x")
    before = cache.stats, cache.generation("x")
    with pytest.raises(StateError, match=r"finds all 1 slots in use by 'x' \(1 sequence, pinned\)"):
        cache.load_weights("x", files["b"], replace=True)
    after = cache.stats
    assert (replace(after, disk_loads=before[0].disk_loads), cache.generation("x")) == before
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
        with pytest.raises(AdapterError, match="changed since it was registered as adapter 'x'"):
            cache.lease("x")
    cache.load_weights("x", files["a"], replace=True)
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
    cache._background = background  # type: ignore[assignment]
    cache.add_adapter("x", load_adapter(files["a"]))
    for name in "bcdef":
        cache.register(name, files[name])
    futures = [cache.prefetch(name) for name in "bcdefx"]
    background.run()
    assert all(future.done() for future in futures)
    assert futures[-1].exception() is None
    assert "x" in cache.slots
    cache.check_integrity()


def test_who_waits_to_be_prefetched_keeps_no_slot_from_those_before_it(
    files: dict[str, Path],
) -> None:
    cache = room_for(4)
    background = DeferredExecutor()
    cache._background = background  # type: ignore[assignment]
    for name in "abc":
        cache.load_weights(name, files[name])
    cache.activate("a")
    cache.pin("b", allow_last=True)
    futures = [cache.prefetch(name) for name in "ca"]  # c takes the slot of a, whose turn comes
    turns = Thread(target=background.run, daemon=True)
    turns.start()
    turns.join(20)
    assert [future.done() for future in futures] == [True, True]
    assert cache.slots.keys() == {"a", "b"}
    cache.check_integrity()


def test_a_cancelled_prefetch_lets_its_adapter_be_evicted(files: dict[str, Path]) -> None:
    cache = room_for(1)
    gate = Event()
    cache.register("f", files["f"])
    cache._prefetch = lambda entry: gate.wait()  # type: ignore[method-assign, assignment]
    running = cache.prefetch("f")
    cache.add_adapter("x", load_adapter(files["a"]))
    waiting = cache.prefetch("x")
    Timer(0.05, gate.set).start()
    cache.close()
    assert running.done()
    assert waiting.cancelled()
    cache.add_adapter("y", load_adapter(files["b"]))
    assert cache.names == ("f", "y")
    cache.check_integrity()


def test_threads_that_have_looked_at_an_adapter_have_it(files: dict[str, Path]) -> None:
    """Others want its room between the look at its name and the copy."""
    cache = room_for(2)
    cache.add_adapter("x", load_adapter(files["a"]))
    gate, go = Barrier(3), cache._levels.to_slot

    def gated(entry: Any) -> int:
        gate.wait(10)
        gate.wait(10)
        return go(entry)

    cache._levels.to_slot = gated  # type: ignore[method-assign]
    found: list[int] = []
    threads = [Thread(target=lambda: found.append(cache.activate("x"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    gate.wait(10)
    cache.load_weights("b", files["b"])
    cache.load_weights("c", files["c"])
    assert cache.is_on_host("x")
    gate.wait(10)
    for thread in threads:
        thread.join(10)
    assert found == [0, 0]
    cache.check_integrity()


def test_an_evicted_adapter_that_somebody_still_has_is_an_error_and_no_hanging_thread(
    files: dict[str, Path],
) -> None:
    cache = room_for(1)
    cache.add_adapter("x", load_adapter(files["a"]))
    entry = cache._names.get("x")
    cache.add_adapter("y", load_adapter(files["b"]))
    for _ in range(2):
        with pytest.raises(EvictedAdapterError, match="'x' was evicted"):
            cache._levels.to_host(entry)
    cache.check_integrity()


def test_what_steps_use_most_is_evicted_last(files: dict[str, Path]) -> None:
    cache = room_for(3)
    for name in "abc":
        cache.load_weights(name, files[name])
        if name != "c":
            cache.activate(name)
    for _ in range(3):
        cache.rows(["a"])  # a was the first to come, and is the last one used
    cache.load_weights("d", files["d"])
    assert [cache.is_on_host(name) for name in "abcd"] == [True, False, True, True]
    for _ in range(3):
        cache.rows(["a"])
    cache.activate("c")
    cache.rows(["a"])
    cache.activate("d")
    assert cache.slots.keys() == {"a", "d"}


def test_what_another_thread_copies_is_not_evicted(files: dict[str, Path]) -> None:
    """Neither from the host nor from its slot."""
    cache = room_for(2, slots=1)
    for name in "ab":
        cache.load_weights(name, files[name])
    copying, gate, place = Event(), Event(), cache.stacks.place

    def slow(slot: int, fitted: Any) -> None:
        copying.set()
        assert gate.wait(10)
        place(slot, fitted)

    cache.stacks.place = slow  # type: ignore[method-assign]
    first = Thread(target=cache.activate, args=("a",))
    first.start()
    assert copying.wait(10)
    cache.load_weights("c", files["c"])  # b leaves, though a was used before it
    assert [cache.is_on_host(name) for name in "abc"] == [True, False, True]
    second = Thread(target=cache.activate, args=("c",))
    second.start()
    time.sleep(0.02)
    assert cache.slots == {"a": 0}
    gate.set()
    for thread in (first, second):
        thread.join(10)
    assert cache.slots == {"c": 0}
    cache.check_integrity()
