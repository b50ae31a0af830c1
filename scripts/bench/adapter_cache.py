"""Adapter cache at the demo engine's sizes: activation by level, and of 1,000 adapters by Zipf.

No step is run: stacks of eight slots are made from the manifest of the demo's engine. Copies of a
demo adapter with other values are the other adapters.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from trt_lora.runtime import AdapterStore, Manifest, StoreConfig, read_manifest
from trt_lora.runtime.adapters.formats.peft import WEIGHTS_FILE
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.scripts.bench.llama import IdleEngine
from trt_lora.scripts.demo.__main__ import ADAPTERS, ENGINE
from trt_lora.scripts.measuring.report import ResultRow

ADAPTER = "json"
SLOTS, MANY, FILES, ON_HOST = 8, 1000, 16, 100
REQUESTS = 5000
SKEW = 1.1  # Zipf: the n-th adapter is wanted n**-1.1 times as often as the first

Results = dict[str, float]


def make_files(adapter: Path, folder: Path) -> list[Path]:
    """Write adapters of the sizes of one."""
    made = [folder / f"f{number}" for number in range(FILES)]
    tensors = load_file(adapter / WEIGHTS_FILE)
    for number, path in enumerate(made):
        shutil.copytree(adapter, path)
        rng = np.random.default_rng(number)
        save_file({n: rng.permutation(t) for n, t in tensors.items()}, path / WEIGHTS_FILE)
    return made


def activation(cache: AdapterStore, files: Sequence[Path]) -> Results:
    """Activate an adapter that is in a slot, on the host, and on disk alone."""
    for number, path in enumerate(files):
        cache.load(f"a{number}", path)
    names = [name for _ in range(4) for name in cache.names]  # none is in a slot when it is wanted
    on_host = [seconds_of(partial(cache.bindings.activate, name)) for name in names][SLOTS:]
    in_slot = [seconds_of(lambda: cache.bindings.activate(names[-1])) for _ in range(1000)]
    on_disk = list(_from_disk(cache, files[0]))
    return {
        "activation in its slot, us": statistics.median(in_slot) * 1e6,
        "activation from the host, ms": statistics.median(on_host) * 1e3,
        "activation from disk, ms": statistics.median(on_disk) * 1e3,
    }


def _from_disk(cache: AdapterStore, path: Path) -> Iterator[float]:
    for _ in range(20):
        cache.register("fresh", path)
        yield seconds_of(lambda: cache.bindings.activate("fresh"))
        cache.unload("fresh")


def zipf(cache: AdapterStore, files: Sequence[Path]) -> Results:
    """Ask for 1,000 registered adapters, one a step."""
    for number in range(MANY):
        cache.register(f"a{number}", files[number % FILES])
    weights = 1 / np.arange(1, MANY + 1) ** SKEW
    wanted = np.random.default_rng(0).choice(MANY, REQUESTS, p=weights / weights.sum())
    times = [seconds_of(partial(cache.bindings.activate, f"a{n}")) for n in wanted.tolist()]
    stats, quantiles = cache.stats, statistics.quantiles(times, n=100)
    return {
        f"Zipf of {MANY} adapters: found in one of {SLOTS} slots, %": stats.hits / REQUESTS * 100,
        f"found among {ON_HOST} on the host or in a slot, %": ((1 - stats.reads / REQUESTS) * 100),
        "activation under Zipf, p50, ms": quantiles[49] * 1e3,
        "activation under Zipf, p99, ms": quantiles[98] * 1e3,
    }


def measured(
    manifest: Manifest, part: Callable[[AdapterStore, Sequence[Path]], Results], files: list[Path]
) -> Results:
    """Run one part on a cache of its own."""
    limit = ON_HOST * _size(manifest, files[0])
    config = StoreConfig(host_memory=limit) if part is zipf else None
    with closing(AdapterStore(IdleEngine(manifest, HostMemory()), config)) as cache:
        results = part(cache, files)
        cache.check_integrity()
    return results


def rows() -> Iterator[ResultRow]:
    """Activate adapters in slots, in host memory and on disk."""
    manifest = replace(read_manifest(ENGINE), max_loras=SLOTS)
    with tempfile.TemporaryDirectory() as scratch:
        files = make_files(ADAPTERS / ADAPTER, Path(scratch))
        sizes = {"adapter, MB": _size(manifest, files[0]) / 1e6, "slots": SLOTS}
        for part in (activation, zipf):
            yield ResultRow(part.__name__, sizes, measured(manifest, part, files))


def _size(manifest: Manifest, path: Path) -> int:
    return AdapterStore(IdleEngine(manifest, HostMemory())).load("one", path).nbytes


def seconds_of(run: Callable[[], object]) -> float:
    """Call once; freeing the result is not part of the wall time."""
    start = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - start
    del result
    return seconds
