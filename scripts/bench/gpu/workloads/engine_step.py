"""Decode step of an engine: TensorRT's time by CUDA events, and Python's overhead.

Every sequence has 512 tokens in its row of the cache, half of what fits. `graph` is one launch of
the captured graph, `enqueue` the same run kernel by kernel, both between two events; `step` is what
the host waits for a prepared run, as a decoder makes it: tokens in, a launch, logits out.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from trt_lora.plugins.contract.step import CACHE
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.engines.engine import PreparesRuns
from trt_lora.runtime.generation.decoding.step_inputs import BOUND, cache_shapes, token_inputs
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import storage_dtype
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy, tensor_from_storage
from trt_lora.scripts.bench.gpu.layers.llama_engines import LAYERS, MAX_TOKENS, build
from trt_lora.scripts.bench.gpu.layers.timed_engine import TimedRun, timed_run
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B, ModelShape
from trt_lora.scripts.bench.gpu.report import Expectation, Expectations, ResultRow
from trt_lora.scripts.bench.gpu.roofline import LAUNCH_COSTS, overhead_percent
from trt_lora.scripts.bench.gpu.worker import Skipped
from trt_lora.scripts.bench.gpu.workloads.tensorrt_probe import Answer, ask
from trt_lora.scripts.measuring.turns import ROUNDS, Times, alternate

LENGTH = MAX_TOKENS // 2  # tokens of every sequence before the step
SIZES = ((1, 16), (8, 16), (32, 16), (1, 64))
INSTEAD = (
    "the replay of TensorRT-RTX's kernel lists in decode-step (ours, native_dynamic) stands for "
    "it: a replay, not TensorRT"
)
_RUNS = 5  # of which a sample is the median


def expectations() -> Expectations:
    """Return the predictions of the whole step; four layers without the head are close to it."""

    def percent(name: str, m: int, rank: int) -> tuple[float, float]:
        return overhead_percent(m, rank, LAUNCH_COSTS[name])

    return {
        f"m{m} r{rank}": {
            "plugin overhead, %": Expectation(
                *percent("ours", m, rank), at_most=8.0 if rank == 16 else None
            ),
            "native overhead, %": Expectation(
                *percent("native_dynamic", m, rank), at_least=25.0 if rank == 16 else None
            ),
        }
        for m, rank in SIZES
    }


def rows(
    answers: Callable[[], Sequence[Answer]] = ask,
    shape: ModelShape = LLAMA_3_8B,
    rounds: int = ROUNDS,
) -> Iterator[ResultRow]:
    """Build three engines and run them in turns, where one of the flavours runs."""
    flavour = _running(answers())
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        directories = build(Path(scratch), flavour, shape)
        engines = {
            name: stack.enter_context(open_engine(directory, "tensorrt"))
            for name, directory in directories.items()
        }
        for m, rank in SIZES:
            yield measure(engines, m, rank, rounds)


def measure(
    engines: dict[str, Engine], m: int, rank: int, rounds: int, length: int = LENGTH
) -> ResultRow:
    """Time a decode step of m sequences in every engine; `base` has no LoRA."""
    with ExitStack() as stack:
        versions: dict[str, Callable[[], float]] = {}
        notes: dict[str, object] = {}
        for name, engine in engines.items():
            tensor_map = decode_inputs(engine, m, rank, length)
            run, profile = stack.enter_context(timed_run(engine.directory, tensor_map))
            notes[name] = {"profile": profile, "captured": run.has_graph}
            versions |= _versions(name, engine, run, tensor_map)
        times = _time(versions, rounds)
    sizes = {"m": m, "rank": rank, "cache, tokens": length, "layers": LAYERS}
    return _row(f"m{m} r{rank}", sizes, times, notes)


def decode_inputs(engine: Engine, m: int, rank: int, length: int) -> TensorMap:
    """Return the inputs of one decode step of m sequences with `length` tokens each.

    Raises:
        ModelError: the engine has no room for as many.
    """
    manifest = engine.manifest
    if length >= manifest.max_seq_len:
        most = manifest.max_seq_len - 1
        raise ModelError(f"{length} tokens and one more; the engine allows {most}")
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    if manifest.sites:
        manager.add_weights("a", _weights(manifest, rank))
        manager.switch_weights("a")
    ids, lengths = np.arange(m)[:, None] + 3, np.full(m, length)
    arrays = token_inputs(ids, lengths, np.arange(m), manifest.max_seq_len)
    tensors = {name: tensor_from_numpy(array) for name, array in arrays.items()}
    resident = {BOUND: tensors.pop(BOUND), **dict(_cache(manifest, m))}
    tensor_map = TensorMap(tensors | engine.memory.upload(resident))
    manager.refresh_tensor_map(tensor_map)
    return tensor_map


def _running(answers: Sequence[Answer]) -> str:
    for answer in answers:
        if answer.runs:
            return answer.flavour
    reasons = "; ".join(f"{a.flavour} came to {a.reached!r}: {a.reason}" for a in answers)
    raise Skipped(f"no TensorRT runs here ({reasons}). {INSTEAD}")


def _cache(manifest: Manifest, m: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the cache inputs [m, kv_heads, max_len, dim]: random values, the same in each."""
    dtypes = {binding.name: binding.dtype for binding in manifest.inputs}
    for name, shape in cache_shapes(manifest, CACHE, m, manifest.max_seq_len).items():
        values = np.random.default_rng(0).standard_normal(shape, np.float32)
        storage = values.astype(storage_dtype(dtypes[name]))
        yield name, tensor_from_storage(storage, dtypes[name])


def _weights(manifest: Manifest, rank: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    weights: dict[str, object] = {}
    for name, (site, factor) in manifest.lora_bindings.items():
        values = rng.standard_normal(site.shape(factor, rank)) * 0.02
        weights[name] = values.astype(storage_dtype(site.dtype))
    return weights


def _versions(
    name: str, engine: Engine, run: TimedRun, tensor_map: TensorMap
) -> dict[str, Callable[[], float]]:
    assert isinstance(engine, PreparesRuns)  # it is TensorRT's
    prepared = engine.prepare(tensor_map)
    return {
        f"{name} graph": run.graph_us if run.has_graph else run.enqueue_us,
        f"{name} enqueue": run.enqueue_us,
        f"{name} step": partial(_step_us, prepared.run),
    }


def _step_us(run: Callable[[], None]) -> float:
    """Wall time of a run, the engine's own graph included from the second run on."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def _time(versions: dict[str, Callable[[], float]], rounds: int) -> Times:
    def sample(order: Sequence[str]) -> list[float]:
        return [statistics.median(versions[name]() for _ in range(_RUNS)) for name in order]

    names = list(versions)
    sample(names)  # the engines' own graphs are captured
    return alternate(names, sample, rounds)


def _row(name: str, sizes: dict[str, int], times: Times, notes: dict[str, object]) -> ResultRow:
    host = {
        f"{engine} step / graph": times.ratio(f"{engine} step", f"{engine} graph")
        for engine in notes
    }
    overheads = {
        f"{engine} overhead, %": times.overhead_percent(f"{engine} graph", "base graph")
        for engine in notes
        if engine != "base"
    }
    between = {"native / plugin": times.ratio("native graph", "plugin graph")}
    us = {f"{version}, us": times.median(version) for version in times.samples}
    return ResultRow(name, sizes, us, overheads | between | host, notes)
