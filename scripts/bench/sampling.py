"""Time of choosing tokens on the host."""

from functools import partial

import numpy as np

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sampling import choose
from trt_lora.scripts.measuring.seconds import seconds_of


def sampling() -> dict[str, float | str]:
    """Choose a token for each of 8 rows of random logits, as many as Llama-3's vocabulary."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2.5, (8, 128256)).astype(np.float32)
    keys = rng.integers(2**63, size=8, dtype=np.uint64)
    ways = {
        "greedy, ms": SamplingParams(temperature=0),
        "top-k 50 and top-p 0.9, ms (target: under 3)": SamplingParams(
            temperature=0.8, top_k=50, top_p=0.9, seed=0
        ),
        "top-p 0.9 of a flat row, ms": SamplingParams(temperature=0.8, top_p=0.9, seed=0),
        "temperature 0.8 alone, ms": SamplingParams(temperature=0.8, seed=0),
    }
    calls = {label: partial(choose, logits, [way] * 8, keys) for label, way in ways.items()}
    return {
        label: min(seconds_of(call).wall for _ in range(20)) * 1e3 for label, call in calls.items()
    }
