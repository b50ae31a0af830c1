"""Time of choosing who joins a batch: 64 rows, 200 adapters by Zipf's law, 32 slots, a full queue."""

import statistics
from dataclasses import replace
from time import sleep, thread_time

import numpy as np

from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import zeros
from trt_lora.runtime.generation.sampling import SamplingParams
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.serving.lora_batcher import LoRABatcher
from trt_lora.runtime.serving.request import Request
from trt_lora.scripts.bench.gpu.layers.llama_manager import OnDevice, llama_manifest

ROWS, ADAPTERS, SLOTS, QUEUE = 64, 200, 32, 256
STEPS, FIRST = 2000, 500  # all of them, and the first that is counted
TOKENS = (32, 96)  # of an answer, from and to
BASE_SHARE = 0.3  # of the requests
ENGINE_SECONDS = 1e-3  # that a step leaves other threads for copies


class Clients:
    """As many requests at any time as rows and queue hold; each that ends is followed by another.

    Answers end by length. The time is that of this thread: another one copies adapters.
    """

    def __init__(self, adapters: SlotAdapters) -> None:
        """Take loaded adapters; nobody has asked for anything."""
        self._names = adapters.names
        self._adapters, self._batcher = adapters, LoRABatcher[Lease](adapters)
        self._ends: dict[int, tuple[int, Lease | None]] = {}  # step and lease by request
        self._rng, self._next = np.random.default_rng(0), 0
        shares = 1 / np.arange(1, len(self._names) + 1)
        self._shares = shares / shares.sum()

    def step(self) -> float:
        """Return the seconds of a step, those of the requests that end and come with it, too."""
        while self._batcher.waiting < QUEUE:
            self._submit()
        begin = thread_time()
        choice = self._batcher.choose(ROWS - self._batcher.running)
        seconds = thread_time() - begin
        for joined in choice.joined:
            self._ends[joined.request.id] = (joined.last_step, joined.lease)
        ended = [n for n, (step, _) in self._ends.items() if step <= self._batcher.steps]
        for request in ended:
            _, lease = self._ends.pop(request)
            if lease is not None:
                self._adapters.release(lease)
        begin = thread_time()
        for request in ended:
            self._batcher.end(request)
        return seconds + thread_time() - begin

    @property
    def running(self) -> int:
        """How many rows are in use."""
        return self._batcher.running

    def _submit(self) -> None:
        is_base = self._rng.random() < BASE_SHARE
        name = None if is_base else str(self._rng.choice(self._names, p=self._shares))
        sampling = SamplingParams(max_new_tokens=int(self._rng.integers(*TOKENS)))
        self._batcher.submit(Request(self._next, name, (1,), sampling, self._batcher.steps))
        self._next += 1


def tiny_adapters(count: int, slots: int) -> SlotAdapters:
    """Return adapters of rank 1 at one site: their size does not matter here."""
    manifest = llama_manifest("float16")
    site = replace(manifest.sites[0], k=16, n=16)
    manifest = replace(manifest, sites=(site,), max_lora_rank=1, max_loras=slots)
    adapters = SlotAdapters(OnDevice(manifest, HostMemory()))
    weights = {
        name: zeros(site.shape(factor, 1), "float16")
        for name, (site, factor) in manifest.lora_bindings.items()
    }
    for number in range(count):
        adapters.add_adapter(f"a{number}", Adapter(f"random adapter {number}", weights))
    return adapters


def scheduling() -> dict[str, float | str]:
    """Choose who joins 64 rows of 200 adapters by Zipf's law over 32 slots, 256 requests waiting."""
    with tiny_adapters(ADAPTERS, SLOTS) as adapters:
        clients = Clients(adapters)
        rows, times = [], []
        for _ in range(STEPS):
            times.append(clients.step() * 1e6)
            rows.append(clients.running)
            sleep(ENGINE_SECONDS)
    return {
        "rows in use, mean": statistics.mean(rows[FIRST:]),
        "a step, mean, us (target: under 50)": statistics.mean(times[FIRST:]),
        "median, us": statistics.median(times[FIRST:]),
        "99th percentile, us": statistics.quantiles(times[FIRST:], n=100)[98],
    }
