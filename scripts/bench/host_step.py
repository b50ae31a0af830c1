"""The host's part of a step, from the end of the engine's run to the tokens' delivery and on.

The engine's run costs nothing: logits are made before, as an engine on a CPU leaves them. All else
is as in a server: a thread steps, makes text, and hands each request its token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from queue import SimpleQueue
from threading import Event
from time import perf_counter, thread_time

import numpy as np

from trt_lora.plugins.contract.step import CACHE, LOGITS
from trt_lora.runtime import AdapterStore, SamplingParams, Scheduler, ServingConfig, TensorMap
from trt_lora.runtime.engines.host_topk import HostTopK
from trt_lora.runtime.engines.onnxruntime.exp_sums import OnnxRuntimeExpSums
from trt_lora.runtime.engines.topk import TEMPERATURES, Floats, Logits
from trt_lora.runtime.generation.decoding.step_inputs import (
    INPUT_IDS,
    KEPT_PLACES,
    LENGTHS,
    TOKEN_SHAPES,
)
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import StepAnswers, Token
from trt_lora.runtime.manifest import Binding, Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy
from trt_lora.runtime.serving.engine_loop import EngineLoop
from trt_lora.scripts.bench.llama import IdleEngine, llama_manifest
from trt_lora.scripts.measuring.report import ResultRow

VOCABULARY, MAX_LEN, STEPS = 49_152, 1024, 200  # the vocabulary is that of the demo's model
WARM_UP = 5  # steps before
ROWS = (8, 32)
WAYS = {
    "greedy": SamplingParams(temperature=0),
    "logprobs 5": SamplingParams(temperature=0, logprobs=5),
    "temperature 1": SamplingParams(temperature=1, seed=0),
}
PEAKS = {"flat": 0.0, "peaked": 20.0}  # by how much one logit of a row is above the others


@dataclass(kw_only=True)
class StubEngine(IdleEngine):
    """Finds the same logits [rows, vocabulary] at every step, as ONNX Runtime's."""

    found: Logits
    exp_sums: OnnxRuntimeExpSums = field(default_factory=OnnxRuntimeExpSums)

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Return logits of the places kept."""
        return {LOGITS: tensor_from_numpy(self.found[: tensor_map[KEPT_PLACES].shape[0]])}

    def topk(self, logits: Tensor, temperatures: Floats) -> HostTopK:
        """Return what looks at logits."""
        del temperatures
        return HostTopK.of(logits, self.exp_sums)

    def prepare_topk(self, tensor_map: TensorMap, *, logits: str, fed: str) -> "StubRun":
        """Return a run of as many places."""
        del logits, fed
        return StubRun(self.found[: tensor_map[KEPT_PLACES].shape[0]], self.exp_sums)


class StubRun:
    """`TopKRun` that costs nothing."""

    def __init__(self, logits: Logits, exp_sums: OnnxRuntimeExpSums) -> None:
        """Find these logits at every run."""
        rows = len(logits)
        self._logits, self._exp_sums = logits, exp_sums
        ids, each = np.zeros((rows, 1), np.int64), np.zeros(rows, np.int64)
        self.inputs: Mapping[str, Array] = {
            INPUT_IDS: ids, LENGTHS: each, TEMPERATURES: np.zeros(rows)
        }  # fmt: skip

    def bind(self, tensor_map: TensorMap) -> None:
        """Nothing is read."""

    def enqueue(self, *, is_fed: bool = False) -> None:
        """Nothing is run."""

    def result(self) -> HostTopK:
        """Return what looks at the logits."""
        return HostTopK(self._logits, self._exp_sums)

    def discard(self) -> None:
        """Nothing is under way."""


@dataclass
class TokenReceiver:
    """Stands for clients: takes the tokens of each step, and notes when they came."""

    requests: int
    tokens: SimpleQueue[list[Token]] = field(default_factory=SimpleQueue)
    # Of the clock and of the stepping thread's processor, at the end of each delivery.
    times: list[tuple[float, float]] = field(default_factory=list)
    are_done: Event = field(default_factory=Event)

    def take(self, answers: StepAnswers) -> None:
        """Hand over the tokens of a step, as to another thread that has taken those before."""
        if not self.tokens.empty():
            self.tokens.get()
        self.tokens.put(tokens := [*answers.tokens.values()])
        self.requests -= sum(token.finish_reason is not None for token in tokens)
        self.times.append((perf_counter(), thread_time()))
        if self.requests == 0:
            self.are_done.set()


def rows() -> Iterator[ResultRow]:
    """Measure steps, with text where the demo's model is here, whose tokenizer makes it."""
    from trt_lora.scripts.demo.__main__ import MODEL

    tokenizer = TextTokenizer(MODEL) if (MODEL / "tokenizer.json").is_file() else None
    for count, way, logits in product(ROWS, WAYS, PEAKS):
        yield measure(count, way, logits, tokenizer)


def measure(
    count: int, way: str, logits: str, tokenizer: TextTokenizer | None = None, steps: int = STEPS
) -> ResultRow:
    """Measure steps of full rows, from one delivery to the next.

    Args:
        count: rows of the batch.
        way: one of `WAYS`, by which tokens are chosen.
        logits: one of `PEAKS`.
        tokenizer: makes text of the tokens; None makes none.
        steps: that count.
    """
    found = random_logits(count, PEAKS[logits])
    engine = StubEngine(_manifest(count), HostMemory(), found=found)
    config = ServingConfig(rows=count)
    scheduler = Scheduler(engine, AdapterStore(engine), config, tokenizer=tokenizer)
    sampling = replace(WAYS[way], max_tokens=WARM_UP + steps + 2, ignore_eos=True)
    for row in range(count):  # equal prompts would be run once
        scheduler.submit([row], sampling)
    receiver = TokenReceiver(count)
    with EngineLoop(scheduler, receiver.take):
        receiver.are_done.wait()
    times, used = map(_milliseconds, zip(*receiver.times, strict=True))
    return ResultRow(
        f"{count} rows, {way}, {logits}",
        {"vocabulary": VOCABULARY, "text": tokenizer is not None, "steps": len(times)},
        {
            "a tenth is faster, ms": times[len(times) // 10],
            "median, ms": times[len(times) // 2],
            "slowest, ms": times[-1],
            "processor time, a tenth is faster, ms": used[len(used) // 10],
        },
    )


def _milliseconds(ends: Sequence[float]) -> list[float]:
    """What steps took, sorted; in the last one all rows are given up."""
    return sorted((end - start) * 1e3 for start, end in pairwise(ends[WARM_UP:-1]))


def random_logits(rows: int, peak: float) -> Logits:
    """Return logits [rows, vocabulary] of a standard deviation of 1, one of them higher."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, VOCABULARY), np.float32)
    logits[np.arange(rows), rng.integers(0, VOCABULARY, rows)] += np.float32(peak)
    return logits


def _manifest(rows: int) -> Manifest:
    """One layer of Llama's with a static cache, and no site."""
    cache = [Binding(f"{CACHE}0.{part}", "float32", ("batch", 1, MAX_LEN, 4)) for part in "kv"]
    tokens = [Binding(n, "int64", shape) for n, shape in TOKEN_SHAPES.items()]
    new = [replace(each, name=f"new_{each.name}", in_place_of=each.name) for each in cache]
    return replace(
        llama_manifest("float32"),
        sites=(),
        inputs=(*tokens, *cache),
        outputs=(Binding(LOGITS, "float32", ("kept", VOCABULARY)), *new),
        max_batch_size=rows,
        max_input_len=8,
        max_seq_len=MAX_LEN,
    )
