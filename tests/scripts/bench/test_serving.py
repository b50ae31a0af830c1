"""The benchmarks of serving: rows are used, every step is timed, adapters are moved."""

import pytest

from trt_lora.scripts.bench import scheduling
from trt_lora.scripts.bench.scheduling import ROWS, Clients, measure, tiny_adapters


def test_every_step_is_timed_and_rows_are_used() -> None:
    with tiny_adapters(12, 4) as adapters:
        rounds, rows = measure(Clients(adapters), 2, 40)
        adapters.check_integrity()
    assert [len(times) for times in rounds] == [40, 40]
    assert min(map(min, rounds)) > 0
    assert ROWS / 2 < rows <= ROWS


def test_each_number_of_slots_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ADAPTERS": 40, "ROUNDS": 1, "STEPS": 5}.items():
        monkeypatch.setattr(scheduling, name, value)
    assert [row.name for row in scheduling.rows()] == ["8 slots", "32 slots"]
