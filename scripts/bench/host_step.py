"""The host's part of a step: all that `Scheduler.step` does but run the engine.

Logits are made before, as an engine on a CPU leaves them; the engine's run is left out of the time.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from time import perf_counter

import numpy as np

from trt_lora.plugins.contract.step import CACHE, LOGITS
from trt_lora.runtime import SamplingParams, Scheduler, TensorMap
from trt_lora.runtime.generation.decoding.step_inputs import TOKEN_SHAPES
from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import Binding, Manifest
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy
from trt_lora.scripts.bench.llama import IdleEngine, llama_manifest
from trt_lora.scripts.measuring.report import ResultRow

VOCABULARY, MAX_LEN, STEPS = 49_152, 1024, 40  # the vocabulary is that of the demo's model
ROWS = (8, 32)
WAYS = {
    "greedy": SamplingParams(temperature=0),
    "logprobs 5": SamplingParams(temperature=0, logprobs=5),
    "temperature 1": SamplingParams(temperature=1, seed=0),
}
PEAKS = {"flat": 0.0, "peaked": 20.0}  # by how much one logit of a row is above the others


@dataclass(kw_only=True)
class StubEngine(IdleEngine):
    """Answers with the same logits [rows, vocabulary], and times itself."""

    logits: Logits
    seconds: float = 0.0  # of all runs

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        """Return logits of the places kept."""
        start = perf_counter()
        kept = tensor_map["kept"].shape[0]
        found = {LOGITS: tensor_from_numpy(self.logits[:kept].copy())}
        self.seconds += perf_counter() - start
        return found


def rows() -> Iterator[ResultRow]:
    """Measure steps, with text where the demo's model is here, whose tokenizer makes it."""
    from trt_lora.scripts.demo.__main__ import MODEL

    tokenizer = TextTokenizer(MODEL) if (MODEL / "tokenizer.json").is_file() else None
    for count, way, logits in product(ROWS, WAYS, PEAKS):
        yield measure(count, way, logits, tokenizer)


def measure(
    count: int, way: str, logits: str, tokenizer: TextTokenizer | None = None, steps: int = STEPS
) -> ResultRow:
    """Measure steps of full rows.

    Args:
        count: rows of the batch.
        way: one of `WAYS`, by which tokens are chosen.
        logits: one of `PEAKS`.
        tokenizer: makes text of the tokens; None makes none.
        steps: that count.
    """
    always = random_logits(count, PEAKS[logits])
    engine = StubEngine(_manifest(count), HostMemory(), logits=always)
    batch = Scheduler(engine, rows=count, tokenizer=tokenizer)
    sampling = replace(WAYS[way], max_tokens=steps + 2, ignore_eos=True)
    for _ in range(count):
        batch.submit([1], sampling)
    batch.step()  # the prompts
    times = [_step_ms(batch, engine) for _ in range(steps)]
    return ResultRow(
        f"{count} rows, {way}, {logits}",
        {"vocabulary": VOCABULARY, "text": tokenizer is not None},
        {"step, ms": statistics.median(times), "slowest step, ms": max(times)},
    )


def random_logits(rows: int, peak: float) -> Logits:
    """Return logits [rows, vocabulary] of a standard deviation of 1, one of them higher."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, VOCABULARY), np.float32)
    logits[np.arange(rows), rng.integers(0, VOCABULARY, rows)] += np.float32(peak)
    return logits


def _step_ms(batch: Scheduler, engine: StubEngine) -> float:
    run, start = engine.seconds, perf_counter()
    batch.step()
    return (perf_counter() - start - (engine.seconds - run)) * 1e3


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
