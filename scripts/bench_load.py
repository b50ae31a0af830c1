"""Load an adapter of Llama-3-8B's shapes and print, as JSON, seconds or peak memory.

Run by bench.py: `write` makes a PEFT directory, `time` measures a load beside
`safetensors.numpy.load_file` of the same file, in turns; `peak` loads once, in a fresh process.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.dtypes import Array, storage_dtype
from trt_lora.runtime.memory import HostMemory
from trt_lora.runtime.peft_format import WEIGHTS_FILE
from trt_lora.runtime.read_buffer import ReadBuffer
from trt_lora.runtime.save import save_adapter
from trt_lora.runtime.weight import Weight
from trt_lora.scripts.bench_build import resident_bytes
from trt_lora.scripts.gpu.manager import llama_manifest, manager_of

ROUNDS = 5


def write(directory: Path, rank: int, dtype: str, scale: float) -> None:
    """Write a PEFT adapter of random values for every linear."""
    rng = np.random.default_rng(0)

    def weight(name: str, shape: tuple[int, int], scale: float = 1.0) -> Weight:
        def read(buffer: ReadBuffer | None = None) -> Array:
            values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
            return values.astype(storage_dtype(dtype))

        return Weight((name,), shape, dtype, read, scale)

    pairs = {
        site.path: (weight("A", (site.k, rank)), weight("B", (rank, site.n), scale))
        for site in llama_manifest(dtype).sites
    }
    save_adapter(Adapter.of_pairs("random", pairs), directory, "peft")


def measure_time(directory: Path, dtype: str) -> dict[str, float]:
    """Seconds of our load and of the library's, the best of some rounds in turns.

    Those of a clock, and those of all processors together, which neighbours lengthen less.
    """
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(_seconds(partial(manager_of(HostMemory(), dtype).load_weights, "a", directory)))
        theirs.append(_seconds(lambda: load_file(directory / WEIGHTS_FILE)))
    (wall, cpu), (load_wall, load_cpu) = (map(min, zip(*s, strict=True)) for s in (ours, theirs))
    return {"ours": wall, "load_file": load_wall, "ours_cpu": cpu, "load_file_cpu": load_cpu}


def _seconds(run: Callable[[], object]) -> tuple[float, float]:
    clock, processors = time.perf_counter(), time.process_time()
    result = run()
    taken = time.perf_counter() - clock, time.process_time() - processors
    del result  # freeing is not part of it
    return taken


def measure_peak(directory: Path, dtype: str) -> dict[str, float]:
    """Peak of the memory in RAM above what the imports hold."""
    manager = manager_of(HostMemory(), dtype)
    before = resident_bytes()
    manager.load_weights("a", directory)
    return {"peak": _peak_bytes() - before, "adapters": len(manager.get_adapter_names())}


def _peak_bytes() -> int:
    """The most memory that this process had in RAM (Linux); `getrusage` counts its parent's too."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    """Run `write DIR RANK DTYPE SCALE`, `time DIR DTYPE` or `peak DIR DTYPE`."""
    what, directory, *rest = sys.argv[1:]
    if what == "write":
        write(Path(directory), int(rest[0]), rest[1], float(rest[2]))
    else:
        measure = measure_time if what == "time" else measure_peak
        print(json.dumps(measure(Path(directory), rest[0])))


if __name__ == "__main__":
    main()
