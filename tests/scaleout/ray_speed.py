"""Tokens a second through Ray Serve, beside those of servers that are asked directly, in turns."""

# pyright: reportMissingImports=false
import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import aiohttp
from scaleout.fleet import Fleet
from scaleout.streams import Asker, Stream
from support.eventually import eventually
from support.served_process import started

STREAMS, TOKENS, ROUNDS = 16, 40, 3


@contextmanager
def servers(fleet: Fleet, count: int) -> Iterator[list[str]]:
    """Serve the demo's model by so many processes; yield their addresses."""
    words = [fleet.real, "--lora-dir", fleet.real_folder, "--served-model-name", "base"]
    words += ["--backend", "onnxruntime", "--max-num-seqs", "8", "--drain-grace", "0"]
    with ExitStack() as stack:
        found = [stack.enter_context(started(*words)) for _ in range(count)]
        assert all(eventually(server.is_ready) for server in found)
        yield [str(server.client.base_url).rstrip("/") for server in found]


async def is_fast(asker: Asker, fleet: Fleet) -> None:
    """Ask both in turns, and print their ratios."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        with servers(fleet, 2) as addresses:
            alone = [Asker(session, address) for address in addresses]
            ways = {"alone": alone, "Ray": [asker]}
            for way in ways.values():
                await _round(way, fleet)
            found = {name: list[tuple[float, float, float]]() for name in ways}
            for _ in range(ROUNDS):
                for name, way in ways.items():
                    found[name].append(await _round(way, fleet))
    for name, values in found.items():
        speed, gap, first = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{name}: {speed:.0f} tok/s, gap p99 {gap * 1e3:.0f} ms, first {first * 1e3:.0f} ms")
    pairs = list(zip(found["Ray"], found["alone"], strict=True))
    speeds, gaps = ([ray[i] / one[i] for ray, one in pairs] for i in (0, 1))
    print(f"Ray beside alone: speed {_range(speeds)} (bar 0.85), gap p99 {_range(gaps)} (bar 1.5)")


async def _round(askers: Sequence[Asker], fleet: Fleet) -> tuple[float, float, float]:
    """Tokens a second, the 99th percentile of gaps, and the median first token; in seconds."""
    start = time.perf_counter()
    names = fleet.real_names
    found: list[Stream] = await asyncio.gather(
        *(
            askers[number % len(askers)].stream(names[number % len(names)], TOKENS)
            for number in range(STREAMS)
        )
    )
    seconds = time.perf_counter() - start
    assert all(stream.status == 200 and not stream.error for stream in found)
    gaps = sorted(gap for stream in found for gap in stream.gaps_s)
    first = statistics.median(stream.first_s for stream in found)
    return STREAMS * TOKENS / seconds, gaps[int(len(gaps) * 0.99)], first


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f} to {max(values):.2f}]"
