"""An engine's decode step and its switch of adapters, as `trt-lora bench` measures them."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from trt_lora.plugins.errors import StateError
from trt_lora.plugins.tensorrt.flavour import flavour_named
from trt_lora.runtime import Executor, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.bench.gpu.llama_engines import build
from trt_lora.scripts.bench.llama import LLAMA_3_8B
from trt_lora.scripts.measuring.answer_times import answer_times
from trt_lora.scripts.measuring.benchmark import VariantTimes, WorkloadTimes
from trt_lora.scripts.measuring.measure import measure
from trt_lora.scripts.measuring.random_weights import random_weights
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import Spread, alternate
from trt_lora.scripts.measuring.variants import BenchmarkRun, run_of
from trt_lora.scripts.measuring.worker import Skipped
from trt_lora.scripts.measuring.workload import BatchWorkload, ranks_of, workloads
from trt_lora.scripts.terminal.adapters import timed_switch

ROUNDS, SWITCHES = 7, 500


def demo_rows() -> Iterator[ResultRow]:
    """Measure the demo's engine on this CPU.

    Raises:
        ManifestError: `make demo` has not built it.
    """
    from trt_lora.scripts.demo.__main__ import ADAPTERS, ENGINE

    paths = {path.name: path for path in sorted(ADAPTERS.iterdir())}
    with open_engine(ENGINE, "onnxruntime") as engine:
        yield from rows("demo", engine, paths)


def gpu_rows(flavour: str) -> Iterator[ResultRow]:
    """Build plans of a few Llama-3-8B layers and measure each: our plugin, native, no LoRA.

    Raises:
        Skipped: the flavour is not installed, or nothing builds engines.
    """
    if not flavour_named(flavour).installed:
        raise Skipped(f"{flavour} is not installed")
    if find_spec("transformers") is None:
        raise Skipped("plans are built with transformers, which is not installed")
    with TemporaryDirectory() as scratch:
        directories = build(Path(scratch), flavour, LLAMA_3_8B)
        plugin, base = (open_engine(directories[name], "tensorrt") for name in ("plugin", "base"))
        with plugin as idle, base as without:
            yield from idle_rows(idle, without)
        for name, directory in directories.items():
            with open_engine(directory, "tensorrt") as engine:
                yield from rows(name, engine, {})


def idle_rows(idle: Executor, without: Executor, rounds: int = ROUNDS) -> Iterator[ResultRow]:
    """Measure a token of the base model: LoRA's nodes with zeros, and the same plan without them.

    Args:
        idle: an engine with LoRA.
        without: the same model without.
        rounds: that count.
    """
    runs = {"idle": run_of(idle, {}, ()), "without": run_of(without, {}, ())}
    for workload in workloads(without.manifest):

        def sample(names: Sequence[str], workload: BatchWorkload = workload) -> list[float]:
            return [_token_ms(runs[name], workload, without.manifest) for name in names]

        times = alternate(list(runs), sample, rounds, warm_up=1)
        yield ResultRow(
            f"idle nodes m{workload.rows}",
            {"rows": workload.rows},
            {f"{name}, token, ms": times.median(name) for name in runs},
            {"idle / without": times.ratio("idle", "without")},
        )


def _token_ms(run: BenchmarkRun, workload: BatchWorkload, manifest: Manifest) -> float:
    prompts = workload.prompts(manifest, 0)
    batch = run.batch(run.variants[0], workload.rows)
    times = answer_times(batch, prompts, [None] * workload.rows, workload.new_tokens)
    return 1e3 * statistics.median(times.tokens)


def rows(
    name: str, engine: Executor, paths: Mapping[str, Path], rounds: int = ROUNDS
) -> Iterator[ResultRow]:
    """Measure answers of base model, adapters and random adapters in turns, then switches.

    Args:
        name: of the engine, with which each row begins.
        engine: a running engine.
        paths: adapters by name.
        rounds: that count.
    """
    ranks = ranks_of(engine.manifest)
    run = run_of(engine, paths, ranks)
    for workload in measure(engine, run, workloads(engine.manifest), rounds).workloads:
        yield from (_row(name, workload, times) for times in workload.contestants)
    if engine.manifest.sites and not engine.manifest.max_loras:
        yield _switches(name, engine, paths, ranks)


def _row(name: str, workload: WorkloadTimes, times: VariantTimes) -> ResultRow:
    sizes = {"rows": workload.rows, "prompt": workload.prompt_tokens, "rank": times.rank}
    return ResultRow(
        f"{name} m{workload.rows} {times.contestant}",
        sizes | {"new tokens": workload.new_tokens},
        {"first token, ms": times.first_token_ms, "token, ms": times.token_p50_ms},
        {
            "first token / base": Spread(
                times.first_token_ratio, times.first_token_ratio_min, times.first_token_ratio_max
            ),
            "token / base": Spread(times.token_ratio, times.token_ratio_min, times.token_ratio_max),
        },
    )


def _switches(
    name: str, engine: Executor, paths: Mapping[str, Path], ranks: tuple[int, ...]
) -> ResultRow:
    """`switch_weights` and `refresh_tensor_map`, in turns between base model and adapters.

    Raises:
        StateError: a switch has moved the tensors of an adapter.
    """
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    for adapter, path in paths.items():
        manager.load_weights(adapter, path)
    for rank in ranks:
        manager.add_weights(f"random {rank}", random_weights(engine.manifest, rank))
    names = [None, *manager.get_adapter_names()]
    before = [_pointers(manager, each) for each in names]
    times = [timed_switch(manager, names[i % len(names)]) for i in range(SWITCHES)]
    if [_pointers(manager, each) for each in names] != before:
        raise StateError(f"{SWITCHES} switches have moved the tensors of an adapter")
    percentile = statistics.quantiles(times, n=100)[98]
    return ResultRow(
        f"{name} switch",
        {"bindings": len(engine.manifest.lora_bindings), "adapters": len(names) - 1},
        {"median, us": statistics.median(times), "99th percentile, us": percentile},
    )


def _pointers(manager: LoRAManager, name: str | None) -> list[int]:
    timed_switch(manager, name)
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    return [tensor.pointer for tensor in tensor_map.values()]
