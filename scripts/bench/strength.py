"""Switch adapters of Llama-3-8B's shapes to other strengths; print time and memory as JSON.

Run by cpu.py. Beside each switch the B's are copied once, as fast as numpy does it.
"""

import json
import sys
from timeit import timeit

import numpy as np

from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.scripts.bench.gpu.layers.llama_manager import llama_manifest, manager_of
from trt_lora.scripts.measuring.process_memory import resident_bytes
from trt_lora.scripts.measuring.random_weights import random_weights

ROUNDS = 7
NAMES = ("a", "b")


def main() -> None:
    """Run `DTYPE RANK`."""
    dtype, rank = sys.argv[1], int(sys.argv[2])
    weights = random_weights(llama_manifest(dtype), rank)
    every_b = [
        array.storage().reshape(-1) for name, array in weights.items() if name.startswith("lora_B")
    ]
    manager = manager_of(HostMemory(), dtype)
    for name in NAMES:
        manager.add_weights(name, weights)
    before = resident_bytes()
    first = _switch(manager, NAMES[0], 0.7)
    _switch(manager, NAMES[1], 0.7)
    more = resident_bytes() - before
    seconds: dict[str, list[float]] = {"0.5": [], "0.3": [], "copy": []}
    for _ in range(ROUNDS):  # in turns, so that a noisy neighbour slows all of them
        for scale in ("0.5", "0.3"):
            for name in NAMES:
                seconds[scale].append(_switch(manager, name, float(scale)))
        seconds["copy"].append(timeit(lambda: np.concatenate(every_b), number=1))
    print(
        json.dumps(
            {label: min(times) for label, times in seconds.items()}
            | {
                "first": first,
                "more": more,
                "size": sum(array.nbytes for array in weights.values()),
            }
        )
    )


def _switch(manager: LoRAManager, name: str, scale: float) -> float:
    return timeit(lambda: manager.switch_weights(name, scale), number=1)


if __name__ == "__main__":
    main()
