"""Threads load, replace, unload and pin while batches run: no row has another's answer."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hostile.stress_slots import Stress, prepare

from trt_lora.plugins.errors import StateError
from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.adapters.fitting.fit import Fitted
from trt_lora.runtime.store.entry import Entry
from trt_lora.runtime.store.levels import Levels
from trt_lora.runtime.store.slot_stacks import SlotStacks

pytestmark = [pytest.mark.slow, pytest.mark.needs_torch]


@dataclass(frozen=True)
class Built:
    """An engine with slots, and more adapters than it has."""

    engine: Engine
    files: list[Path]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("stress")
    files = prepare(folder)
    with open_engine(folder / "engine", "onnxruntime") as engine:
        yield Built(engine, files)


def test_no_row_has_anothers_answer(built: Built) -> None:
    assert Stress(built.engine, built.files).run(10) > 200


def test_a_slot_that_is_taken_from_a_row_under_way_is_found(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress = Stress(built.engine, built.files)
    evictable = property(lambda entry: entry.in_slot is not None and entry.in_slot.done())
    monkeypatch.setattr(Entry, "is_evictable_from_slot", evictable)
    monkeypatch.setattr(Levels, "can_hold", lambda *_: True)
    with pytest.raises((AssertionError, StateError)):
        stress.run(20)


def test_a_slot_that_is_not_filled_in_time_is_found(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress = Stress(built.engine, built.files)
    place = SlotStacks.place
    late: list[tuple[int, Fitted]] = []

    def place_the_one_before(stacks: SlotStacks, slot: int, fitted: Fitted) -> None:
        late.append((slot, fitted))
        if len(late) > 1:
            place(stacks, *late.pop(0))

    monkeypatch.setattr(SlotStacks, "place", place_the_one_before)
    with pytest.raises(AssertionError, match="alone"):
        stress.run(20)
