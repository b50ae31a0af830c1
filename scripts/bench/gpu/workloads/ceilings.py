"""Launch cost of a CUDA graph node, and device copy bandwidth."""

from collections.abc import Callable, Iterator

import torch

from trt_lora.scripts.bench.gpu.report import Expectation, Expectations, ResultRow
from trt_lora.scripts.bench.gpu.roofline import BYTES_PER_US, LAUNCH_US
from trt_lora.scripts.bench.gpu.session import Bench

_NODES = 1000
_COPY_BYTES = 4 << 30

EXPECTATIONS: Expectations = {
    "node of a graph": {
        "us": Expectation(*LAUNCH_US),
        "us, in a cluster": Expectation(*LAUNCH_US),
    },
    "copy on the device": {"TB/s": Expectation(0.97 * BYTES_PER_US / 1e6, BYTES_PER_US / 1e6)},
}


def rows(bench: Bench) -> Iterator[ResultRow]:
    """Measure an empty node, alone and in a cluster, and the bandwidth of a copy."""
    ratios = {
        "us": _node_us(bench, clusters=False),
        "us, in a cluster": _node_us(bench, clusters=True),
    }
    yield ResultRow("node of a graph", {"nodes": _NODES}, ratios=ratios)
    nbytes = min(_COPY_BYTES, bench.device.free_bytes() // 4)
    source = bench.device.random(nbytes // 2)
    target = torch.empty_like(source)
    replay = bench.device.capture(lambda: target.copy_(source))
    us = bench.time({"copy": replay}).median("copy")
    yield ResultRow("copy on the device", {"bytes": nbytes}, ratios={"TB/s": 2 * nbytes / us / 1e6})


def _node_us(bench: Bench, *, clusters: bool) -> float:
    """The difference between two chains, so that the start of a graph does not count."""

    def chain(nodes: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(nodes):
                bench.device.elementwise.nothing(clusters=clusters)

        return run

    replays = {
        name: bench.device.capture(chain(n)) for name, n in (("a", _NODES), ("b", 2 * _NODES))
    }
    times = bench.time(replays)
    return (times.median("b") - times.median("a")) / _NODES
