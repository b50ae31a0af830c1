"""Load an adapter of Llama-3-8B's shapes; print time or peak memory as JSON.

Run by cpu.py: `write` makes a PEFT directory, `time` measures a load beside
`safetensors.numpy.load_file` of the same file, in turns; `peak` loads once, in a fresh process.
"""

import json
import sys
from functools import partial
from pathlib import Path

from safetensors.numpy import load_file

from trt_lora.runtime.adapters.formats.peft import WEIGHTS_FILE
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.scripts.bench.gpu.layers.llama_manager import manager_of
from trt_lora.scripts.bench.gpu.layers.random_peft_adapter import write_random_adapter
from trt_lora.scripts.measuring.process_memory import peak_resident_bytes, resident_bytes
from trt_lora.scripts.measuring.seconds import seconds_of

ROUNDS = 5


def measure_time(directory: Path, dtype: str) -> dict[str, float]:
    """Seconds of our load and of the library's, the best of some rounds in turns.

    Those of a clock, and those of all processors together, which neighbours lengthen less.
    """
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(
            seconds_of(partial(manager_of(HostMemory(), dtype).load_weights, "a", directory))
        )
        theirs.append(seconds_of(lambda: load_file(directory / WEIGHTS_FILE)))
    (wall, cpu), (load_wall, load_cpu) = (map(min, zip(*s, strict=True)) for s in (ours, theirs))
    return {"ours": wall, "load_file": load_wall, "ours_cpu": cpu, "load_file_cpu": load_cpu}


def measure_peak(directory: Path, dtype: str) -> dict[str, float]:
    """Peak of the memory in RAM above what the imports hold."""
    manager = manager_of(HostMemory(), dtype)
    before = resident_bytes()
    manager.load_weights("a", directory)
    return {"peak": peak_resident_bytes() - before, "adapters": len(manager.get_adapter_names())}


def main() -> None:
    """Run `write DIR RANK DTYPE SCALE`, `time DIR DTYPE` or `peak DIR DTYPE`."""
    task, directory, *rest = sys.argv[1:]
    if task == "write":
        write_random_adapter(Path(directory), int(rest[0]), rest[1], float(rest[2]))
    else:
        measure = measure_time if task == "time" else measure_peak
        print(json.dumps(measure(Path(directory), rest[0])))


if __name__ == "__main__":
    main()
