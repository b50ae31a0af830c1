"""Threads on one engine: every answer is that of a thread alone."""

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from trt_lora.runtime import Engine, SamplingParams, open_engine

THREADS = 4
PROMPTS = ([[5, 6, 7, 8, 9, 10, 11]], [[40, 41], [3]], [[3, 4, 5] * 7])
TEMPERATURES = (0.0, 2.0)

Case = tuple[str, int, float]  # adapter, prompt, temperature
Answer = list[tuple[int, ...]]


def run(seconds: float) -> int:
    """Build a tiny engine with two adapters and stress it; return the number of answers checked."""
    from support.models.quick_build import quick_build
    from support.models.tiny_models import save_adapter, save_model, tiny_config

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = save_model("Llama", folder / "model")
        adapters = {
            name: save_adapter(model, folder / name, seed=rank, r=rank)
            for name, rank in (("a", 4), ("b", 16))
        }
        quick_build(tiny_config(model, folder / "engine"))
        with open_engine(folder / "engine", "onnxruntime") as engine:
            return stress(engine, adapters, seconds)


def stress(engine: Engine, adapters: Mapping[str, Path], seconds: float) -> int:
    """Let threads answer the same questions in any order; return the number of answers checked.

    Raises:
        AssertionError: an answer is not that of a thread alone.
    """
    cases = list(product(["", *adapters], range(len(PROMPTS)), TEMPERATURES))
    alone = answerer(engine, adapters)
    expected = {case: alone(case) for case in cases}
    end = time.monotonic() + seconds
    barrier = threading.Barrier(THREADS)

    def check(seed: int) -> int:
        answer = answerer(engine, adapters)
        barrier.wait(60)  # nobody is done before the last one begins
        checked = 0
        for case in _endless(cases, seed):
            if time.monotonic() > end:
                break
            found = answer(case)
            assert found == expected[case], f"{case}: {found}, alone {expected[case]}"
            checked += 1
        return checked

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(check, range(THREADS)))


def answerer(engine: Engine, adapters: Mapping[str, Path]) -> Callable[[Case], Answer]:
    """Return what answers a case, with names of its own for the adapters."""
    prefix = str(threading.get_ident())
    for name, path in adapters.items():
        engine.adapters.load(f"{prefix} {name}", path, replace=True)

    def answer(case: Case) -> Answer:
        adapter, prompt, temperature = case
        named = f"{prefix} {adapter}" if adapter else None
        sampling = SamplingParams(max_tokens=8, temperature=temperature, ignore_eos=True, seed=0)
        answers = engine.generate(PROMPTS[prompt], adapter=named, sampling=sampling)
        return [completion.token_ids for completion in answers]

    return answer


def _endless(cases: list[Case], seed: int) -> Iterator[Case]:
    order = random.Random(seed)
    while True:
        yield order.choice(cases)
