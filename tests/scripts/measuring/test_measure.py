"""Measuring: whose turn it is, what counts, and ratios of one moment, on a clock of the test's."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.fakes.clocked_engine import ClockedEngine
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.slot_engine import number_file
from support.fakes.tiny_engine import engine_directory, small_manifest

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.scripts.measuring import answer_times
from trt_lora.scripts.measuring.benchmark import Benchmark, VariantTimes
from trt_lora.scripts.measuring.measure import measure, percentile
from trt_lora.scripts.measuring.variants import BASE, MIXED, BenchmarkRun, run_of
from trt_lora.scripts.measuring.workload import BatchWorkload

PROMPT, NEW = 5, 4


def bench(
    engine: ClockedEngine, folder: Path, rows: int, numbers: tuple[int, ...], rounds: int = 2
) -> Benchmark:
    """Measure the adapters of some numbers, on the engine's own clock."""
    paths = {str(number): number_file(folder, number) for number in numbers}
    run = run_of(engine, paths, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_times, "perf_counter", engine.clock)
        return measure(engine, run, [BatchWorkload(rows, PROMPT, NEW)], rounds)


def by_name(found: Benchmark) -> dict[str, VariantTimes]:
    (times,) = found.workloads
    return {contestant.contestant: contestant for contestant in times.contestants}


def test_times_and_ratios_are_those_of_the_clock(tmp_path: Path) -> None:
    found = by_name(bench(ClockedEngine(slots=2), tmp_path, 2, (1, 4)))
    assert list(found) == [BASE, "1", "4", MIXED]
    for name, number in ((BASE, 0), ("1", 1), ("4", 4), (MIXED, 4)):
        times = found[name]
        assert times.token_p50_ms == times.token_p99_ms == 1e3 * (number + 1)
        assert times.token_ratio == number + 1
        assert times.first_token_ms == 1e3 * (number * PROMPT + 1)
        assert times.first_token_ratio == number * PROMPT + 1
        assert times.tokens_per_second == 2 / (number + 1)


def test_contestants_take_turns_and_every_round_is_the_reverse_of_the_last(tmp_path: Path) -> None:
    engine = ClockedEngine(slots=2)
    bench(engine, tmp_path, 1, (1, 4), rounds=2)
    assert engine.numbers[::NEW] == [0, 1, 4, 4, 1, 0, 0, 1, 4]
    assert len(engine.numbers) == 9 * NEW


class SlowingEngine(ClockedEngine):
    """Takes twice as long in every round: each has `NEW` runs of two contestants."""

    def execute(self, tensor_map):  # type: ignore[no-untyped-def]
        if self.steps and self.steps % (2 * NEW) == 0:
            self.slow_down()
        return super().execute(tensor_map)


class StumblingEngine(ClockedEngine):
    """Takes twice as long in the last of eight turns, which is the base model's."""

    def execute(self, tensor_map):  # type: ignore[no-untyped-def]
        if self.steps == 7 * NEW:
            self.slow_down()
        return super().execute(tensor_map)


def test_a_machine_that_slows_down_changes_no_ratio(tmp_path: Path) -> None:
    found = by_name(bench(SlowingEngine(slots=1, slowdown=2.0), tmp_path, 1, (2,), rounds=4))
    assert found["2"].token_ratio == 3
    assert found["2"].first_token_ratio == 2 * PROMPT + 1
    # The first round warms up; steps of the others take 2, 4, 8 and 16 seconds.
    assert (found[BASE].token_p50_ms, found[BASE].token_p99_ms) == (6e3, 16e3)


def test_every_turn_is_announced_before_it_is_taken(tmp_path: Path) -> None:
    engine, said = ClockedEngine(slots=1), list[tuple[str, int, int, int]]()
    run = run_of(engine, {"2": number_file(tmp_path, 2)}, ())
    asked = [BatchWorkload(1, PROMPT, NEW), BatchWorkload(2, PROMPT, NEW)]

    def turn(name: str, done: int, total: int) -> None:
        said.append((name, done, total, len(engine.numbers)))

    measure(engine, run, asked, 1, turn)
    assert said == [
        ("warm-up, 1 row: (base)", 0, 8, 0),
        ("warm-up, 1 row: 2", 1, 8, NEW),
        ("round 1 of 1, 1 row: 2", 2, 8, 2 * NEW),
        ("round 1 of 1, 1 row: (base)", 3, 8, 3 * NEW),
        ("warm-up, 2 rows: (base)", 4, 8, 4 * NEW),
        ("warm-up, 2 rows: 2", 5, 8, 5 * NEW),
        ("round 1 of 1, 2 rows: 2", 6, 8, 6 * NEW),
        ("round 1 of 1, 2 rows: (base)", 7, 8, 7 * NEW),
    ]


def test_a_ratio_has_the_least_and_the_most_of_its_rounds(tmp_path: Path) -> None:
    found = by_name(bench(StumblingEngine(slots=1, slowdown=2.0), tmp_path, 1, (2,), rounds=3))
    assert (found["2"].token_ratio_min, found["2"].token_ratio_max) == (1.5, 3)
    assert found["2"].first_token_ratio_min == (2 * PROMPT + 1) / 2
    assert found["2"].first_token_ratio_max == 2 * PROMPT + 1
    assert (found[BASE].token_ratio_min, found[BASE].token_ratio_max) == (1, 1)


def test_rows_with_another_adapter_each_need_two_rows(tmp_path: Path) -> None:
    assert MIXED not in by_name(bench(ClockedEngine(slots=2), tmp_path, 1, (1, 4)))


def test_an_adapter_at_a_time_is_switched_to_before_it_is_measured(tmp_path: Path) -> None:
    engine = ClockedEngine(slots=1)
    run = BenchmarkRun(engine, {"3": number_file(tmp_path, 3)}, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer_times, "perf_counter", engine.clock)
        found = by_name(measure(engine, run, [BatchWorkload(1, PROMPT, NEW)], 2))
    assert found[BASE].token_p50_ms == 1e3
    assert found["3"].token_p50_ms == 4e3


@pytest.mark.parametrize("name", [BASE, MIXED, "random, rank 4"])
def test_an_adapter_cannot_have_a_name_of_the_benchmark(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the benchmark's own; give the adapter another"):
        run_of(ClockedEngine(slots=2), {name: number_file(tmp_path, 1)}, (4,))


def test_a_percentile_lies_among_the_values() -> None:
    assert percentile([7.0], 99) == 7.0
    values = [float(value) for value in range(101)]
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [50, 90, 99]
    assert percentile([1.0, 2.0], 99) <= 2.0


def test_a_gpu_is_measured_and_gives_all_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    trt = FakeTensorRT(cuda)
    trt.install(monkeypatch)
    manifest = small_manifest()
    trt.manifest = manifest
    directory = engine_directory(tmp_path / "engine", manifest)
    with TensorRTEngine(directory, replace(manifest, max_lora_rank=4)) as engine:
        run = run_of(engine, {}, (2, 4))
        found = measure(engine, run, [BatchWorkload(1, 3, 3), BatchWorkload(2, 3, 3)], rounds=1)
        assert found.backend == "TensorRT"
        assert found.machine["gpu"] == "Fake GPU 0"
        assert found.memory_bytes["free on the GPU"] > 0
        for times in found.workloads:
            assert [c.rank for c in times.contestants] == [0, 2, 4]
            assert all(c.tokens_per_second > 0 for c in times.contestants)
        del run
    cuda.check()
