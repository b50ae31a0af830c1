"""The benchmark of scheduling: rows are used, and every step is timed."""

from trt_lora.scripts.bench.cpu import MEASUREMENTS
from trt_lora.scripts.bench.serving.scheduling import ROWS, Clients, measure, tiny_adapters


def test_every_step_is_timed_and_rows_are_used() -> None:
    with tiny_adapters(12, 4) as adapters:
        rounds, rows = measure(Clients(adapters), 2, 40)
        adapters.check_integrity()
    assert [len(times) for times in rounds] == [40, 40]
    assert min(map(min, rounds)) > 0
    assert ROWS / 2 < rows <= ROWS


def test_the_command_measures_it() -> None:
    assert "scheduling" in MEASUREMENTS
