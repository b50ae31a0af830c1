"""What this GPU reaches: a copy, and nodes of a graph that do nothing. Predictions start here."""

from collections.abc import Callable, Iterator

import torch

from trt_lora.plugins.kernels.constants import THREADS
from trt_lora.plugins.kernels.launch_plan import Launch
from trt_lora.scripts.bench.gpu.device import CudaDevice
from trt_lora.scripts.bench.gpu.path_model import Ceilings
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import ROUNDS, alternate

WARM_UP = 3
NODES, COPIES = 512, 4  # of a graph
COPY_BYTES = 512 << 20  # of a copy: ten times the largest level-2 cache
_CTAS = 72  # of a decode step of Llama-3-8B on an H100


def rows() -> Iterator[ResultRow]:
    """Measure the current GPU, in one row."""
    with torch.no_grad():
        yield measure(CudaDevice())[1]


def measure(device: CudaDevice, rounds: int = ROUNDS) -> tuple[Ceilings, ResultRow]:
    """Return what a GPU reaches, as predictions take it and as a row."""
    cluster = device.chip.cluster
    source = device.empty(COPY_BYTES // 4, dtype=torch.float32)
    target = torch.empty_like(source)

    def nodes(ctas: int, of_a_cluster: int, stream: Callable[[], int]) -> None:
        launch = Launch("empty", (ctas, 1, 1), THREADS, of_a_cluster, 0, splits=1)
        for _ in range(NODES):
            device.enqueue_empty(launch, stream())

    def copies() -> None:
        for _ in range(COPIES):
            target.copy_(source)

    replays = {
        "copy": device.capture(copies),
        "node": device.capture(lambda: nodes(1, 1, device.stream)),
        "clusters": device.capture(lambda: nodes(_CTAS, cluster, device.stream)),
    }
    times = alternate(
        list(replays), lambda names: device.times_us([replays[n] for n in names]), rounds,
        warm_up=WARM_UP,
    )  # fmt: skip
    moved = 2 * COPY_BYTES * COPIES  # read and written
    node, clusters = (times.median(name) / NODES for name in ("node", "clusters"))
    ceilings = Ceilings(device.megahertz, moved / times.median("copy"), node)
    return ceilings, ResultRow(
        "ceilings",
        {"multiprocessors": device.chip.multiprocessors, "cluster": cluster, "nodes": NODES},
        {
            "copy, TB/s": ceilings.bytes_per_us / 1e6,
            "MHz": ceilings.megahertz,
            "empty node, us": node,
            f"{_CTAS} empty CTAs, us": clusters,
        },
    )
