"""Buckets are vLLM's, and those of the engine's process can be told as vLLM's."""

from trt_lora.runtime.server.engine_process.step_meter import SECONDS
from trt_lora.runtime.server.telemetry.buckets import BETWEEN, cumulative, up_to


def test_tokens_are_counted_in_steps_of_one_two_and_five() -> None:
    assert up_to(100) == [1, 2, 5, 10, 20, 50, 100]
    assert up_to(64) == [1, 2, 5, 10, 20, 50]


def test_counts_are_summed_up_to_the_bounds_that_are_told() -> None:
    counts, bounds = [1, 2, 4, 8], [0.5, 1.0, 2.0]
    assert cumulative(counts, bounds, bounds) == [("0.5", 1), ("1.0", 3), ("2.0", 7), ("+Inf", 15)]
    assert cumulative(counts, bounds, [1.0]) == [("1.0", 3), ("+Inf", 15)]


def test_the_gaps_have_all_of_vllms_bounds_and_some_below() -> None:
    assert set(BETWEEN) < set(SECONDS)
    assert sum(bound < BETWEEN[0] for bound in SECONDS) > 5  # where steps of milliseconds lie
