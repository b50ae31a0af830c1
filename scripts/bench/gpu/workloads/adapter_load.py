"""Adapter load time, from file to device, and its effect on concurrent decoding."""

import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.memory.host import Memory
from trt_lora.scripts.bench.gpu.device import Replay
from trt_lora.scripts.bench.gpu.layers.decoder_layers import DecoderLayers
from trt_lora.scripts.bench.gpu.layers.llama_manager import llama_manifest, manager_of
from trt_lora.scripts.bench.gpu.layers.lora_methods import no_lora
from trt_lora.scripts.bench.gpu.layers.random_peft_adapter import write_random_adapter
from trt_lora.scripts.bench.gpu.report import Expectation, Expectations, ResultRow
from trt_lora.scripts.bench.gpu.roofline import adapter_bytes
from trt_lora.scripts.bench.gpu.session import Bench
from trt_lora.scripts.measuring.seconds import seconds_of

RANKS = (16, 64, 256)
DTYPE = "float16"
_PINNED_GB_S = 55.0  # PCIe 5, pinned; docs/benchmarks/gpu.md
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


def rows(bench: Bench, memory: Memory) -> Iterator[ResultRow]:
    """Measure the bus, then adapters of three ranks."""
    peak = _peak_gb_s(bench)
    yield ResultRow("pinned copy to the device", {"bytes": _PEAK_BYTES}, ratios={"GB/s": peak})
    chain = DecoderLayers(bench.device, bench.model, bench.weights, 1)
    step = bench.device.capture(lambda: chain.run(no_lora(bench.model)))
    for rank in RANKS:
        yield _load(bench, memory, rank, step, peak)


def _load(bench: Bench, memory: Memory, rank: int, step: Replay, peak_gb_s: float) -> ResultRow:
    manifest = llama_manifest(DTYPE)
    with TemporaryDirectory() as scratch:
        directory = Path(scratch) / "adapter"
        write_random_adapter(directory, rank, DTYPE)
        load = _median_seconds(lambda: manager_of(memory, DTYPE).load_weights("a", directory))
        fitted = fit_adapter(load_adapter(directory, manifest), manifest).tensors
        upload = _median_seconds(lambda: memory.upload(fitted))
        alone, meanwhile = _steps_us(bench, step, lambda: memory.upload(fitted))
    size = adapter_bytes(rank)
    return ResultRow(
        f"r{rank}",
        {"rank": rank, "bytes": size},
        {"file to device, ms": 1e3 * load, "upload, GB/s": size / upload / 1e9},
        {
            "upload, ms": 1e3 * upload,
            "upload / pinned copy": upload / (size / peak_gb_s / 1e9),
            "step while loading / step": meanwhile / alone,
        },
    )


def _peak_gb_s(bench: Bench) -> float:
    nbytes = min(_PEAK_BYTES, bench.device.free_bytes() // 4)
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bench.device.where.type == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=bench.device.where)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        bench.device.synchronize()

    return nbytes / _median_seconds(copy) / 1e9


def _median_seconds(run: Callable[[], object]) -> float:
    """Return the median time of some runs, after a warm-up."""
    seconds = [seconds_of(run).wall for _ in range(_TIMES + 1)]
    return statistics.median(seconds[1:])


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
