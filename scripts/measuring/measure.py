"""Measure an engine: variants take turns at every workload, so that ratios are of one moment."""

import statistics
from collections.abc import Callable, Sequence
from itertools import count

from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.decoding.kv_cache import cache_regions
from trt_lora.runtime.memory.tensor import HOST
from trt_lora.scripts.measuring.answer_times import AnswerTimes
from trt_lora.scripts.measuring.benchmark import Benchmark, VariantTimes, WorkloadTimes
from trt_lora.scripts.measuring.machine import machine_of
from trt_lora.scripts.measuring.process_memory import peak_resident_bytes, resident_bytes
from trt_lora.scripts.measuring.turns import Times, orders
from trt_lora.scripts.measuring.variants import BASE, BenchmarkRun, Variant, Workload
from trt_lora.scripts.measuring.workload import how_many

Answers = dict[str, list[AnswerTimes]]
Turn = Callable[[str, int, int], object]


def measure(
    engine: Executor,
    run: BenchmarkRun,
    workloads: Sequence[Workload],
    rounds: int,
    turn: Turn = lambda *_: None,
) -> Benchmark:
    """Measure every workload.

    Args:
        engine: a running engine.
        run: its variants.
        workloads: what they answer, the same in each round.
        rounds: that count; one more before them warms up.
        turn: called before each turn with what it is, how many there are before it, and in all.

    Raises:
        OutputError: logits are NaN or infinite.
        BackendError: a device has no room for a cache.
    """
    total = (rounds + 1) * sum(len(_taking_part(run, workload)) for workload in workloads)
    done = count()

    def announce(name: str) -> None:
        turn(name, next(done), total)

    times = tuple(
        _workload_times(engine, run, workload, rounds, announce) for workload in workloads
    )
    device = engine.memory.device
    return Benchmark(
        engine.manifest.base_model.name,
        "ONNX Runtime" if device == HOST else "TensorRT",
        machine_of(device),
        _memory(engine, run, max(workload.rows for workload in workloads)),
        times,
    )


def _taking_part(run: BenchmarkRun, workload: Workload) -> dict[str, Variant]:
    return {c.name: c for c in run.variants if c.adapters[1:] == () or workload.rows > 1}


def _workload_times(
    engine: Executor,
    run: BenchmarkRun,
    workload: Workload,
    rounds: int,
    announce: Callable[[str], None],
) -> WorkloadTimes:
    variants = _taking_part(run, workload)
    answers: Answers = {name: [] for name in variants}
    rows = how_many(workload.rows, "row")
    for number, order in enumerate(orders(list(variants), rounds + 1)):
        for name in order:
            announce(f"{f'round {number} of {rounds}' if number else 'warm-up'}, {rows}: {name}")
            answers[name].append(run.times(variants[name], workload, number))
    timed = {name: times[1:] for name, times in answers.items()}  # the first round warms up
    return WorkloadTimes(
        workload.rows,
        workload.prompt_tokens,
        workload.new_tokens,
        rounds,
        tuple(_variant_times(c, timed, workload.rows) for c in variants.values()),
    )


def _variant_times(variant: Variant, answers: Answers, rows: int) -> VariantTimes:
    first = Times({name: [t.first_token for t in times] for name, times in answers.items()})
    decode = Times({name: [t.decode for t in times] for name, times in answers.items()})
    tokens = [seconds for times in answers[variant.name] for seconds in times.tokens]
    p50, p90, p99 = (percentile(tokens, percent) * 1e3 for percent in (50, 90, 99))
    first_ratios, ratios = (t.ratios(variant.name, BASE) for t in (first, decode))
    return VariantTimes(
        variant.name,
        variant.rank,
        first.median(variant.name) * 1e3,
        statistics.median(first_ratios),
        p50,
        p90,
        p99,
        statistics.median(ratios),
        rows * len(tokens) / sum(tokens),
        min(first_ratios),
        max(first_ratios),
        min(ratios),
        max(ratios),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that `percent` of all do not exceed, between neighbours on a line."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _memory(engine: Executor, run: BenchmarkRun, rows: int) -> dict[str, int]:
    """Bytes of what an answer needs, and of this process; what is 0 is not known here."""
    cache = sum(region.nbytes(rows) for region in cache_regions(engine.manifest, rows))
    found = {
        "this process, now": resident_bytes(),
        "this process, most": peak_resident_bytes(),
        f"KV cache of {rows} rows": cache,
        **{c.name: c.nbytes for c in run.variants if len(c.adapters) == 1},
    }
    if engine.memory.device != HOST:
        found["free on the GPU"] = engine.memory.free_bytes()
    return {name: nbytes for name, nbytes in found.items() if nbytes}
