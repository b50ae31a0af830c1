"""Cost of switching between resident adapters, on the host and in captured graphs."""

import statistics
import time
from collections.abc import Iterator, Sequence

from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import TensorMap
from trt_lora.scripts.bench.gpu.device import Replay
from trt_lora.scripts.bench.gpu.layers.decoder_layers import DecoderLayers
from trt_lora.scripts.bench.gpu.layers.llama_manager import MODULES, manager_of, site_path
from trt_lora.scripts.bench.gpu.layers.lora_methods import TrtLoraKernels
from trt_lora.scripts.bench.gpu.layers.random_adapters import LayerFactors, random_adapter
from trt_lora.scripts.bench.gpu.report import Expectation, Expectations, ResultRow
from trt_lora.scripts.bench.gpu.session import Bench
from trt_lora.scripts.terminal.adapters import timed_switch

RANKS = (16, 64)
_SWITCHES, _GRAPHS = 500, 4

EXPECTATIONS: Expectations = {
    "on the host, 448 bindings": {"switch + refresh, us": Expectation(at_most=200.0)},
    "capture for another adapter": {},
    "a graph for each adapter": {"another graph / the same": Expectation(0.99, 1.01)},
}


def rows(bench: Bench, memory: Memory) -> Iterator[ResultRow]:
    """Measure a switch in each of the ways that there are."""
    yield on_the_host(bench, memory, _adapters(bench))
    yield from graph_rows(bench)


def graph_rows(bench: Bench) -> Iterator[ResultRow]:
    """Measure what a switch asks of captured graphs."""
    adapters = _adapters(bench)
    chain = DecoderLayers(bench.device, bench.model, bench.weights, 1)
    # Alternately: what stays of an adapter in Python is then the same for both.
    methods = [
        TrtLoraKernels(bench.device, bench.model, adapters[i % 2], 1, streams=2)
        for i in range(_GRAPHS)
    ]
    free = bench.device.free_bytes()
    seconds, graphs = _captures(bench, chain, methods)
    taken = max(free - bench.device.free_bytes(), 0) / _GRAPHS
    yield ResultRow(
        "capture for another adapter",
        {"m": 1, "ranks": RANKS, "layers": bench.model.layers},
        {"run once and capture, ms": 1e3 * statistics.median(seconds)},
        notes={"who": "TensorRT-Edge-LLM and TensorRT-RTX's own capture, at every new address"},
    )
    yield _between_graphs(bench, graphs, taken)


def on_the_host(
    bench: Bench, memory: Memory, adapters: Sequence[Sequence[LayerFactors]]
) -> ResultRow:
    """Time `LoRAManager` between the base model and adapters of Llama-3-8B's shapes."""
    dtype = str(bench.device.dtype).removeprefix("torch.")
    manager = manager_of(memory, dtype)
    bench.device.synchronize()
    for rank, adapter in zip(RANKS, adapters, strict=True):
        manager.add_weights(f"r{rank}", _bindings(adapter))
    names = ["", *manager.get_adapter_names()]
    times = [timed_switch(manager, names[i % len(names)]) for i in range(_SWITCHES)]
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    quantiles = statistics.quantiles(times, n=100)
    return ResultRow(
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
            a, b = BindingNames.LORA.pair(path)
            tensors |= {a: factors.a, b: factors.b}
    return tensors


def _captures(
    bench: Bench, chain: DecoderLayers, methods: Sequence[TrtLoraKernels]
) -> tuple[list[float], list[Replay]]:
    seconds, graphs = [], []
    for ours in methods:
        start = time.perf_counter()
        graphs.append(bench.device.capture(lambda ours=ours: chain.run(ours)))  # type: ignore[misc]
        seconds.append(time.perf_counter() - start)
    return seconds, graphs


def _between_graphs(bench: Bench, graphs: Sequence[Replay], taken: float) -> ResultRow:
    """The second of two replays: of another adapter's graph, or of the same one's again."""
    ratios = []
    for _ in range(bench.options.rounds):
        _, same, _, another = bench.device.times_us([graphs[0], graphs[2], graphs[1], graphs[0]])
        ratios.append(another / same)
    return ResultRow(
        "a graph for each adapter",
        {"m": 1, "ranks": RANKS, "graphs": len(graphs)},
        {"memory of a graph, MB": taken / 1e6},
        {"another graph / the same": statistics.median(ratios)},
    )
