"""Time of choosing who joins a batch: 64 rows, 200 adapters by Zipf's law, a full queue."""

import statistics
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from time import sleep, thread_time

import numpy as np

from trt_lora.plugins.contract.step import LOGITS
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import zeros
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sequence import Sequence, new_sequence
from trt_lora.runtime.manifest import Binding
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.serving.admission import AdmissionPolicy
from trt_lora.runtime.store.store import AdapterStore
from trt_lora.scripts.bench.llama import IdleEngine, llama_manifest
from trt_lora.scripts.measuring.report import ResultRow

ROWS, ADAPTERS, QUEUE, VOCABULARY = 64, 200, 256, 32_000
SLOTS = (8, 32)  # of an engine; the fewer, the more of the rows stay empty
ROUNDS, STEPS = 10, 200
TOKENS = (32, 96)  # of an answer, from and to
BASE_SHARE = 0.3  # of the requests
ENGINE_SECONDS = 1e-4  # that a step leaves to the thread which copies adapters


class Clients:
    """As many requests at any time as rows and queue hold; each that ends is followed by another.

    Answers end by length. The time is that of this thread: another one copies adapters.
    """

    def __init__(self, adapters: AdapterStore) -> None:
        """Take loaded adapters; there is no request yet."""
        self._names = adapters.names
        self._adapters, self.policy = adapters, AdmissionPolicy(adapters)
        self._ends: dict[Sequence, int] = {}  # the step at which each that runs does
        outputs = (Binding(LOGITS, "float32", ("kept", VOCABULARY)),)
        self._manifest = replace(llama_manifest("float16"), outputs=outputs)
        self._rng, self._next = np.random.default_rng(0), 0
        shares = 1 / np.arange(1, len(self._names) + 1)
        self._shares = shares / shares.sum()

    def step(self) -> float:
        """Return the seconds of a step, those of the requests that end and come with it, too."""
        while self.policy.waiting < QUEUE:
            self._submit()
        begin = thread_time()
        step = self.policy.schedule(ROWS - len(self.policy.running))
        seconds = thread_time() - begin
        for sequence in step.preempted:
            del self._ends[sequence]
            self._release(sequence)
            self.policy.preempt(sequence)
        for joined in step.joined:
            self._ends[joined] = self.policy.steps + joined.left
        ended = [s for s, last in self._ends.items() if last <= self.policy.steps]
        for sequence in ended:
            del self._ends[sequence]
            self._release(sequence)
        begin = thread_time()
        for sequence in ended:
            self.policy.end(sequence)
        return seconds + thread_time() - begin

    def _release(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            self._adapters.release(sequence.lease)
            sequence.lease = None

    def _submit(self) -> None:
        is_base = self._rng.random() < BASE_SHARE
        name = None if is_base else str(self._rng.choice(self._names, p=self._shares))
        tokens = int(self._rng.integers(*TOKENS))
        sampling = SamplingParams(max_tokens=tokens, temperature=0)
        sequence = new_sequence([1], sampling, self._manifest, None)
        sequence.id, sequence.adapter, sequence.most = self._next, name, tokens
        self.policy.submit(sequence)
        self._next += 1


def tiny_adapters(count: int, slots: int) -> AdapterStore:
    """Return adapters of rank 1 at one site: their size does not matter here."""
    manifest = llama_manifest("float16")
    site = replace(manifest.sites[0], k=16, n=16)
    manifest = replace(manifest, sites=(site,), max_lora_rank=1, max_loras=slots)
    adapters = AdapterStore(IdleEngine(manifest, HostMemory()))
    weights = {
        name: zeros(site.shape(factor, 1), "float16")
        for name, (site, factor) in manifest.lora_bindings.items()
    }
    for number in range(count):
        adapters.add(f"a{number}", Adapter(f"random adapter {number}", weights))
    return adapters


def rows() -> Iterator[ResultRow]:
    """Choose who joins 64 rows, of 256 requests that wait for 200 adapters by Zipf's law."""
    for slots in SLOTS:
        with closing(tiny_adapters(ADAPTERS, slots)) as adapters:
            rounds, used = measure(Clients(adapters), ROUNDS, STEPS)
        means = [statistics.mean(times) for times in rounds]
        yield ResultRow(
            f"{slots} slots",
            {"rows": ROWS, "rows in use, mean": used},
            {
                "a step, us, mean of the fastest round": min(means),
                "mean of the median round": statistics.median(means),
            },
        )


def measure(clients: Clients, rounds: int, steps: int) -> tuple[list[list[float]], float]:
    """Return microseconds of each step by round, after one that is not counted, and mean rows."""
    times, rows = list[list[float]](), 0
    for _ in range(rounds + 1):
        times.append([])
        for _ in range(steps):
            times[-1].append(clients.step() * 1e6)
            rows += len(clients.policy.running)
            sleep(ENGINE_SECONDS)
    return times[1:], rows / steps / (rounds + 1)
