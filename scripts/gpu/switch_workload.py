"""W6: what a switch between resident adapters costs, on the host and in captured graphs."""

import statistics
import time
from collections.abc import Iterator, Sequence

from trt_lora.plugins.contract import BindingNames
from trt_lora.runtime.memory import Memory
from trt_lora.runtime.tensors import TensorMap
from trt_lora.scripts.gpu.adapters import LayerFactors, random_adapter
from trt_lora.scripts.gpu.bench import Bench
from trt_lora.scripts.gpu.chain import Chain
from trt_lora.scripts.gpu.contestants import Ours
from trt_lora.scripts.gpu.device import Replay
from trt_lora.scripts.gpu.manager import MODULES, manager_of, site_path, switch_us
from trt_lora.scripts.gpu.results import Expectation, Expectations, Row

RANKS = (16, 64)
_SWITCHES, _GRAPHS = 500, 4

EXPECTATIONS: Expectations = {
    "on the host, 448 bindings": {"switch + refresh, us": Expectation(at_most=200.0)},
    "capture for another adapter": {},
    "a graph for each adapter": {"another graph / the same": Expectation(0.99, 1.01)},
    "a table of pointers": {},
}


def rows(bench: Bench, memory: Memory) -> Iterator[Row]:
    """Measure a switch in each of the ways that there are."""
    yield on_the_host(bench, memory, _adapters(bench))
    yield from graph_rows(bench)


def graph_rows(bench: Bench) -> Iterator[Row]:
    """Measure what a switch asks of captured graphs."""
    adapters = _adapters(bench)
    chain = Chain(bench.device, bench.model, bench.weights, 1)
    # Alternately: what stays of an adapter in Python is then the same for both.
    contestants = [Ours(bench.device, bench.model, adapters[i % 2], 1) for i in range(_GRAPHS)]
    free = bench.device.free_bytes()
    seconds, graphs = _captures(bench, chain, contestants)
    taken = max(free - bench.device.free_bytes(), 0) / _GRAPHS
    yield Row(
        "capture for another adapter",
        {"m": 1, "ranks": RANKS, "layers": bench.model.layers},
        {"run once and capture, ms": 1e3 * statistics.median(seconds)},
        notes={"who": "TensorRT-Edge-LLM and TensorRT-RTX's own capture, at every new address"},
    )
    yield _between_graphs(bench, graphs, taken)
    yield Row("a table of pointers", {}, notes={"status": "not built yet: table mode"})


def on_the_host(bench: Bench, memory: Memory, adapters: Sequence[Sequence[LayerFactors]]) -> Row:
    """Time `LoRAManager` between the base model and adapters of Llama-3-8B's shapes."""
    dtype = str(bench.device.dtype).removeprefix("torch.")
    manager = manager_of(memory, dtype)
    bench.device.synchronize()
    for rank, adapter in zip(RANKS, adapters, strict=True):
        manager.add_weights(f"r{rank}", _bindings(adapter))
    names = ["", *manager.get_adapter_names()]
    tensor_map = TensorMap()
    times = [switch_us(manager, names[i % len(names)], tensor_map) for i in range(_SWITCHES)]
    quantiles = statistics.quantiles(times, n=100)
    return Row(
        "on the host, 448 bindings",
        {"bindings": len(tensor_map), "ranks": RANKS},
        {"median, us": statistics.median(times), "99th percentile, us": quantiles[98]},
        {"switch + refresh, us": statistics.median(times)},
    )


def _adapters(bench: Bench) -> list[tuple[LayerFactors, ...]]:
    groups, layers = bench.model.groups, bench.model.layers
    return [random_adapter(bench.device, groups, rank, layers) for rank in RANKS]


def _bindings(adapter: Sequence[LayerFactors]) -> dict[str, object]:
    """The adapter by the engine's binding names; layers that the device had no room for are out."""
    tensors: dict[str, object] = {}
    for index, layer in enumerate(adapter):
        in_order = [factors for group in layer.values() for factors in group]
        for name, factors in zip(MODULES, in_order, strict=True):
            path = site_path(index, name)
            tensors[BindingNames.LORA.binding("A", path)] = factors.a
            tensors[BindingNames.LORA.binding("B", path)] = factors.b
    return tensors


def _captures(
    bench: Bench, chain: Chain, contestants: Sequence[Ours]
) -> tuple[list[float], list[Replay]]:
    seconds, graphs = [], []
    for ours in contestants:
        start = time.perf_counter()
        graphs.append(bench.device.capture(lambda ours=ours: chain.run(ours)))  # type: ignore[misc]
        seconds.append(time.perf_counter() - start)
    return seconds, graphs


def _between_graphs(bench: Bench, graphs: Sequence[Replay], taken: float) -> Row:
    """The second of two replays: of another adapter's graph, or of the same one's again."""
    ratios = []
    for _ in range(bench.options.rounds):
        _, same, _, another = bench.device.times_us([graphs[0], graphs[2], graphs[1], graphs[0]])
        ratios.append(another / same)
    return Row(
        "a graph for each adapter",
        {"m": 1, "ranks": RANKS, "graphs": len(graphs)},
        {"memory of a graph, MB": taken / 1e6},
        {"another graph / the same": statistics.median(ratios)},
    )
