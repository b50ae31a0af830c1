"""Another strength of an adapter, or of a blend of two, at the shapes of SDXL's linears."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, product

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime import Adapter, AdapterStore
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.scripts.bench.diffusion.shapes import sdxl_sites
from trt_lora.scripts.bench.llama import IdleEngine, llama_manifest
from trt_lora.scripts.measuring.random_weights import random_weights
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import alternate

RANK, ROUNDS = 16, 8
SITES = (105, 722)  # of all those of SDXL, the first
ANEW, IN_PLACE = "made anew", "in place"


def rows() -> Iterator[ResultRow]:
    """Compare a blend that is made with one that is given other strengths."""
    for dtype, sites, names in product(("float32", "float16"), SITES, ("a", "ab")):
        yield measured(sdxl_sites(dtype)[:sites], names)


def measured(sites: Sequence[Site], names: str, rounds: int = ROUNDS) -> ResultRow:
    """Change strengths of a blend until a step could bind it.

    Args:
        sites: of the engine.
        names: of the adapters, a letter each.
        rounds: of each way.
    """
    dtype = sites[0].dtype
    manifest = replace(llama_manifest(dtype), sites=tuple(sites), max_lora_rank=RANK * len(names))
    store = AdapterStore(IdleEngine(manifest, HostMemory()))
    for seed, name in enumerate(names):
        tensors = random_weights(manifest, RANK, seed)
        store.add(name, Adapter(name, {n: weight_of(n, tensor) for n, tensor in tensors.items()}))
    strengths, used = count(1), list[float]()

    def seconds(way: str) -> float:
        if way == ANEW:
            store.unload("x")
        parts, start, processor = dict.fromkeys(names, 1 / next(strengths)), *_clocks()
        store.blend("x", parts, replace=True, at_once=True)
        end, done = _clocks()
        used.extend([done - processor] if way == IN_PLACE else [])
        return end - start

    store.blend("x", dict.fromkeys(names, 2.0), at_once=True)
    ways = [ANEW, IN_PLACE]
    times = alternate(ways, lambda order: [*map(seconds, order)], rounds, warm_up=1)
    nbytes = store.info("x").nbytes
    return ResultRow(
        f"{len(sites)} sites, {dtype}, {' + '.join(names)}",
        {"rank": RANK, "blend, MB": nbytes / 1e6, "rounds": rounds},
        {
            f"{ANEW}, ms": times.median(ANEW) * 1e3,
            f"{IN_PLACE}, ms": times.median(IN_PLACE) * 1e3,
            f"{IN_PLACE}, the fastest, ms": min(times.samples[IN_PLACE]) * 1e3,
            f"{IN_PLACE}, processor time, the least, ms": min(used) * 1e3,
        },
        {f"{IN_PLACE} / {ANEW}": times.ratio(IN_PLACE, ANEW)},
    )


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()
