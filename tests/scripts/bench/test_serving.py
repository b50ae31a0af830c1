"""The benchmarks of serving: rows are used, every step is timed, adapters are moved."""

from contextlib import closing
from pathlib import Path

import pytest
from conftest import TinyEngine

from trt_lora.scripts.bench import adapter_cache, scheduling
from trt_lora.scripts.bench.scheduling import ROWS, Clients, measure, tiny_adapters


def test_every_step_is_timed_and_rows_are_used() -> None:
    with closing(tiny_adapters(12, 4)) as adapters:
        rounds, rows = measure(Clients(adapters), 2, 40)
        adapters.check_integrity()
    assert [len(times) for times in rounds] == [40, 40]
    assert min(map(min, rounds)) > 0
    assert ROWS / 2 < rows <= ROWS


def test_each_number_of_slots_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ADAPTERS": 40, "ROUNDS": 1, "STEPS": 5}.items():
        monkeypatch.setattr(scheduling, name, value)
    assert [row.name for row in scheduling.rows()] == ["8 slots", "32 slots"]


def test_every_part_of_the_adapter_cache_is_measured(
    tiny_engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"MANY": 12, "REQUESTS": 40, "FILES": 9, "ON_HOST": 9, "SLOTS": 4}
    for name, value in sizes.items():
        monkeypatch.setattr(adapter_cache, name, value)
    monkeypatch.setattr(adapter_cache, "ENGINE", tiny_engine.engine)
    monkeypatch.setattr(adapter_cache, "ADAPTERS", tiny_engine.adapter.parent)
    monkeypatch.setattr(adapter_cache, "ADAPTER", tiny_engine.adapter.name)
    rows = {row.name: row.variants for row in adapter_cache.rows()}
    assert list(rows) == ["activation", "zipf"]
    assert rows["activation"]["activation in its slot, us"] > 0
    assert 0 < rows["zipf"]["Zipf of 12 adapters: found in one of 4 slots, %"] < 100


def test_a_call_is_made_once_and_timed() -> None:
    calls: list[int] = []
    assert adapter_cache.seconds_of(lambda: calls.append(sum(range(10**6)))) > 0
    assert len(calls) == 1
