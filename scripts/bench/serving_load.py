"""What requests to a server do to each other: adapters that load, long prompts, few slots, floods.

Each is measured beside the same without it, in turns, on the clock of the client.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.serving.serving_config import ServingConfig
from trt_lora.scripts.bench.http_serving import USAGE, body_of, built, request, web
from trt_lora.scripts.demo.__main__ import ADAPTERS
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import alternate
from trt_lora.scripts.measuring.worker import WrongResultError

ROUNDS, ROWS, TOKENS = 4, 4, 96  # rows that are given tokens, and how many
LONG = 1500  # tokens of a prompt that comes meanwhile
ZIPF, EXPONENT, AT_ONCE, SHORT = 60, 1.1, 4, 8  # requests by Zipf's law; on their way; tokens
FLOOD = 1000  # requests of one client
QUIET, LOADS, PROMPTS = "alone", "while adapters load", f"while prompts of {LONG} tokens come"
RESIDENT, SPREAD = "all adapters resident", "adapters of twice the slots"
_LOAD = "/v1/load_lora_adapter"
_LOOK = "GET {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_STEPS = re.compile(rb"trt_lora:step_seconds_count\{.* ([0-9.]+)$", re.MULTILINE)
_LOOK_S = 0.2  # from one to the next
_USAGE_OF_EACH = {"include_usage": True, "continuous_usage_stats": True}


class Client:
    """Asks a server for answers to prompts that do not repeat."""

    def __init__(self, port: int) -> None:
        """Take its port."""
        self._port, self._numbers = port, count(int(time.time()))

    async def times(
        self, model: str, tokens: int, key: str = "a", prompt: Sequence[int] | None = None
    ) -> list[tuple[int, float]]:
        """Return each event of a stream: how many tokens there are, and seconds since the request.

        Raises:
            WrongResultError: it has another number of tokens at last.
        """
        text = f"{next(self._numbers)} people ask for a fruit:"
        body = body_of(prompt or text, model, tokens)
        body |= {"stream": True, "stream_options": _USAGE_OF_EACH}
        start, times = time.perf_counter(), list[tuple[int, float]]()
        async for line in self._lines(request(body, key)):
            if found := USAGE.search(line):
                times.append((int(found[1]), time.perf_counter() - start))
        if not times or times[-1][0] != tokens:
            raise WrongResultError(f"the events of {tokens} tokens are {times}")
        return times

    async def first(self, model: str, tokens: int = 1, key: str = "a") -> float:
        """Return the seconds to the first token, once all have come."""
        return (await self.times(model, tokens, key))[0][1]

    async def gaps(self, model: str) -> list[float]:
        """Return the seconds between the tokens of a stream, but for the first ones.

        Where tokens come together, as half a character does, they have one gap.
        """
        events = pairwise([(0, 0.0), *await self.times(model, TOKENS)])
        gaps = [(b - a) / (m - n) for (n, a), (m, b) in events if m > n]
        return gaps[3:] or gaps  # a tiny engine has said all before anybody has read

    async def load(self, name: str, path: Path) -> None:
        """Load an adapter in the place of the one of its name."""
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
        lines = [line async for line in self._lines(request(body, path=_LOAD))]
        if b" 200 " not in lines[0]:
            raise WrongResultError(f"the server says {lines[-1]!r}")

    async def until(self, done: Callable[[int, int], bool]) -> None:
        """Wait until the numbers of requests under way, at the last look and now, are as wanted."""
        before: int | None = None
        while True:
            now = int(json.loads(await self._look("/load"))["server_load"])
            if before is not None and done(before, now):
                return
            before = now
            await asyncio.sleep(_LOOK_S)

    async def steps(self) -> int:
        """Return how many steps the engine has made that ran anything."""
        return int(sum(map(float, _STEPS.findall(await self._look("/metrics")))))

    async def _look(self, path: str) -> bytes:
        lines = [line async for line in self._lines(_LOOK.format(path).encode())]
        return b"".join(lines[lines.index(b"\r\n") + 1 :])

    async def _lines(self, asked: bytes) -> AsyncIterator[bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(asked)
            while line := await reader.readline():
                yield line
        finally:
            writer.close()


@asynccontextmanager
async def meanwhile(*works: Any) -> AsyncIterator[None]:
    """Do something beside what the context does, and stop it then."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def rows() -> Iterator[ResultRow]:
    """Measure servers of the engine, which is built if need be."""
    yield from loads(built(), sorted(ADAPTERS.iterdir()))


def loads(engine: Path, paths: Sequence[Path]) -> Iterator[ResultRow]:
    """Measure a server of as many slots as adapters, and one of one slot."""
    slots = read_manifest(engine).max_loras
    names = {f"x{number}": paths[number % len(paths)] for number in range(2 * slots)}
    words = ["trt_lora", "serve", engine, "--backend", "onnxruntime", "--lora-modules"]
    words += [f"{name}={path}" for name, path in names.items()]
    updates = ("--allow-runtime-lora-updating", "--lora-root", paths[0].parent)
    queue = ("--max-num-queued-reqs", 2 * FLOOD)
    with web(*words, *updates, *queue) as server:
        client = Client(server.port)
        yield gap_row(client, list(names)[:slots], paths)
        yield zipf_row(client, list(names), slots)
        yield asyncio.run(flood_row(client, "x0"))
    with web(*words, "--max-loras", 1) as server:
        yield asyncio.run(slot_row(Client(server.port), *list(names)[:2]))


def gap_row(client: Client, names: Sequence[str], paths: Sequence[Path]) -> ResultRow:
    """The 99th percentile of gaps between two tokens of a row."""

    async def load() -> None:
        for number in count():
            await client.load("loaded", paths[number % len(paths)])

    async def prompts() -> None:
        rng = np.random.default_rng(int(time.time()))
        while True:
            await client.times(names[0], 1, prompt=rng.integers(3, 90, LONG).tolist())

    async def measured(way: str) -> float:
        works = {LOADS: load, PROMPTS: prompts}
        async with meanwhile(*(work() for name, work in works.items() if name == way)):
            gaps = await asyncio.gather(*(client.gaps(names[n % len(names)]) for n in range(ROWS)))
        return float(np.percentile(np.concatenate(gaps), 99)) * 1e3

    ways = (QUIET, LOADS, PROMPTS)
    found = alternate(ways, lambda order: [asyncio.run(measured(w)) for w in order], ROUNDS)
    return ResultRow(
        "gaps between tokens",
        {"rows": ROWS, "tokens": TOKENS, "rounds": ROUNDS},
        {f"{way}, 99th percentile, ms": found.median(way) for way in ways},
        {f"{way} / {QUIET}": found.ratio(way, QUIET) for way in (LOADS, PROMPTS)},
    )


def zipf_row(client: Client, names: Sequence[str], slots: int) -> ResultRow:
    """The median first token of adapters by Zipf's law, where all have slots and where half do."""
    rng = np.random.default_rng(0)

    async def measured(way: str) -> float:
        known = names[:slots] if way == RESIDENT else names
        shares = 1 / np.arange(1, len(known) + 1) ** EXPONENT
        asked = iter(rng.choice(known, ZIPF, p=shares / shares.sum()).tolist())
        firsts = list[float]()

        async def ask() -> None:
            for name in asked:
                firsts.append(await client.first(name, SHORT))

        await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
        return float(np.median(firsts)) * 1e3

    ways = (RESIDENT, SPREAD)
    found = alternate(
        ways, lambda order: [asyncio.run(measured(w)) for w in order], ROUNDS, warm_up=1
    )
    return ResultRow(
        "adapters by Zipf's law",
        {"slots": slots, "requests": ZIPF, "at a time": AT_ONCE, "rounds": ROUNDS},
        {f"{way}, median first token, ms": found.median(way) for way in ways},
        {f"{SPREAD} / {RESIDENT}": found.ratio(SPREAD, RESIDENT)},
    )


async def flood_row(client: Client, name: str) -> ResultRow:
    """The first token of a client beside another one's flood, over twice its own and a turn."""
    alone, beside, turns = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        await client.until(lambda _, now: now == 0)  # the flood before it is gone
        await client.first(name)  # behind what its connections have left
        alone.append(await client.first(name, key="b"))
        async with meanwhile(*(client.times(name, SHORT) for _ in range(FLOOD))):
            events = await client.times(name, SHORT, "c")  # behind which the flood has begun
            turns.append(events[-1][1] - events[0][1])
            await client.until(lambda before, now: now <= before)  # all of it has come
            beside.append(await client.first(name, key="b"))
    medians = {"alone": alone, "beside a flood": beside, "a turn": turns}
    values = {what: float(np.median(each)) * 1e3 for what, each in medians.items()}
    bound = 2 * values["alone"] + values["a turn"]
    return ResultRow(
        "a flood of another client",
        {"requests": FLOOD, "tokens": SHORT, "rounds": ROUNDS},
        {f"{what}, ms": value for what, value in values.items()},
        {"beside a flood / (2 alone + a turn)": values["beside a flood"] / bound},
    )


async def slot_row(client: Client, often: str, once: str) -> ResultRow:
    """The first token of an adapter whose only slot another one's requests take in turn."""

    async def flood() -> None:
        while True:
            await client.times(often, TOKENS)

    waits, steps = list[float](), list[int]()
    async with meanwhile(*(flood() for _ in range(ROWS))):
        for _ in range(ROUNDS):
            await client.times(often, TOKENS, "c")
            before = await client.steps()
            waits.append(await client.first(once, key="b"))
            steps.append(await client.steps() - before)
    # Its copy may take a step, and its prompt takes one.
    most = ServingConfig.max_wait_steps + ServingConfig.preempt_after + 2
    return ResultRow(
        "one slot, and another adapter in it",
        {"rows": ROWS, "tokens": TOKENS, "steps, most": most, "rounds": ROUNDS},
        {"the latest, s": max(waits), "the latest, steps": max(steps)},
        {"the latest / steps, most": max(steps) / most},
    )
