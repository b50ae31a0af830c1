"""W7: an adapter from its file to the device, and what decoding meanwhile feels of it."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.dtypes import Array
from trt_lora.runtime.fit import fit_adapter
from trt_lora.runtime.load import load_adapter
from trt_lora.runtime.memory import Memory
from trt_lora.runtime.read_buffer import ReadBuffer
from trt_lora.runtime.save import save_adapter
from trt_lora.runtime.weight import Weight
from trt_lora.scripts.gpu.bench import Bench
from trt_lora.scripts.gpu.chain import Chain
from trt_lora.scripts.gpu.contestants import NoLora
from trt_lora.scripts.gpu.device import Replay
from trt_lora.scripts.gpu.manager import llama_manifest, manager_of
from trt_lora.scripts.gpu.results import Expectation, Expectations, Row
from trt_lora.scripts.gpu.roofline import adapter_bytes

RANKS = (16, 64, 256)
DTYPE = "float16"
_PINNED_GB_S = 55.0  # PCIe 5, pinned; section 3f of performance.md
_STAGED_GB_S = 8.0  # a copy into pinned memory on the way, by one thread
_TIMES, _STEPS = 3, 20
_PEAK_BYTES = 256 << 20


def expectations() -> Expectations:
    """Return the upload at the speed of the bus, and at that of a copy on the host."""

    def milliseconds(rank: int) -> Expectation:
        size = adapter_bytes(rank) / 1e6
        return Expectation(size / _PINNED_GB_S, size / _STAGED_GB_S)

    slowdown = {"step while loading / step": Expectation(1.0, 1.1)}
    peak = {"pinned copy to the device": {"GB/s": Expectation(0.8 * _PINNED_GB_S, _PINNED_GB_S)}}
    loads = {f"r{rank}": {"upload, ms": milliseconds(rank)} | slowdown for rank in RANKS}
    return peak | loads


def rows(bench: Bench, memory: Memory) -> Iterator[Row]:
    """Measure the bus, then adapters of three ranks."""
    peak = _peak_gb_s(bench)
    yield Row("pinned copy to the device", {"bytes": _PEAK_BYTES}, ratios={"GB/s": peak})
    chain = Chain(bench.device, bench.model, bench.weights, 1)
    step = bench.device.capture(lambda: chain.run(NoLora()))
    for rank in RANKS:
        yield _load(bench, memory, rank, step, peak)


def _load(bench: Bench, memory: Memory, rank: int, step: Replay, peak_gb_s: float) -> Row:
    manifest = llama_manifest(DTYPE)
    with TemporaryDirectory() as buffer:
        directory = Path(buffer) / "adapter"
        write(directory, rank)
        load = _seconds(lambda: manager_of(memory, DTYPE).load_weights("a", directory))
        fitted = fit_adapter(load_adapter(directory, manifest), manifest).tensors
        upload = _seconds(lambda: memory.upload(fitted))
        alone, meanwhile = _steps_us(bench, step, lambda: memory.upload(fitted))
    size = adapter_bytes(rank)
    return Row(
        f"r{rank}",
        {"rank": rank, "bytes": size},
        {"file to device, ms": 1e3 * load, "upload, GB/s": size / upload / 1e9},
        {
            "upload, ms": 1e3 * upload,
            "upload / pinned copy": upload / (size / peak_gb_s / 1e9),
            "step while loading / step": meanwhile / alone,
        },
    )


def write(directory: Path, rank: int) -> None:
    """Write a PEFT adapter of random values for every linear, a few of them many times over."""
    rng = np.random.default_rng(0)
    pool = (0.02 * rng.standard_normal(1 << 22, np.float32)).astype(np.float16)

    def weight(name: str, shape: tuple[int, int]) -> Weight:
        def read(buffer: ReadBuffer | None = None) -> Array:
            size = shape[0] * shape[1]
            return np.resize(pool, size).reshape(shape)

        return Weight((name,), shape, DTYPE, read)

    pairs = {
        site.path: (weight("A", site.shape("A", rank)), weight("B", site.shape("B", rank)))
        for site in llama_manifest(DTYPE).sites
    }
    save_adapter(Adapter.of_pairs("random", pairs), directory, "peft")


def _peak_gb_s(bench: Bench) -> float:
    nbytes = min(_PEAK_BYTES, bench.device.free_bytes() // 4)
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bench.device.where.type == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=bench.device.where)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        bench.device.synchronize()

    return nbytes / _seconds(copy) / 1e9


def _seconds(run: Callable[[], object]) -> float:
    """The median of some runs, after one that warms up."""
    times = []
    for _ in range(_TIMES + 1):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
        del result  # freeing is not part of it
    return statistics.median(times[1:])


def _steps_us(bench: Bench, step: Replay, load: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of a step alone, and of one while another thread loads."""

    def median(steps: int) -> float:
        return statistics.median(bench.device.times_us([step])[0] for _ in range(steps))

    alone, stop = median(_STEPS), threading.Event()

    def keep_loading() -> None:
        while not stop.is_set():
            load()

    thread = threading.Thread(target=keep_loading)
    thread.start()
    try:
        return alone, median(2 * _STEPS)
    finally:
        stop.set()
        thread.join()
