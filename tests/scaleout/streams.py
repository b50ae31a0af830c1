"""Requests to a server by aiohttp, many at a time, and what each has got."""

# pyright: reportMissingImports=false
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from clients.served import PROMPT
from scaleout.fleet import TOKENS

FIXED = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
FIXED |= {"stream": True, "return_token_ids": True}


@dataclass
class Stream:
    """What has come of one answer."""

    model: str
    status: int = 0
    tokens: list[int] = field(default_factory=list)
    error: str = ""  # of an event, or of the response
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


class Asker:
    """A client with as many connections as it needs."""

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        """Take the server's address."""
        self._session, self.address = session, address

    async def stream(self, model: str, tokens: int = TOKENS, **body: Any) -> Stream:
        """Return what a stream has brought."""
        found, start = Stream(model), time.perf_counter()
        last = start
        asked = FIXED | {"model": model, "max_tokens": tokens} | body
        url = f"{self.address}/v1/completions"
        async with self._session.post(url, json=asked) as response:
            found.status = response.status
            if response.status != 200:
                found.error = (await response.json())["error"]["message"]
                return found
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event, now = json.loads(line.removeprefix(b"data: ")), time.perf_counter()
                if "error" in event:
                    found.error = event["error"]["message"]
                    continue
                found.tokens += event["choices"][0]["token_ids"]
                found.gaps_s.append(now - last)
                last = now
        found.first_s, *found.gaps_s = found.gaps_s or [0.0]
        return found

    async def streams(self, models: Sequence[str], at_once: int, **body: Any) -> list[Stream]:
        """Ask for models in turn, so many at a time; return what each has got."""
        room = asyncio.Semaphore(at_once)

        async def one(model: str) -> Stream:
            async with room:
                return await self.stream(model, **body)

        return await asyncio.gather(*map(one, models))

    async def ask(self, method: str, path: str, **body: Any) -> tuple[int, Any]:
        """Return a status and a body."""
        given = {"json": body} if body else {}
        async with self._session.request(method, self.address + path, **given) as response:
            text = await response.text()
        is_json = text.startswith(("{", "["))
        return response.status, json.loads(text) if is_json else text

    async def series(self, name: str, label: str = "") -> float:
        """Return the sum of a metric, of all its series that have a label."""
        text = (await self.ask("GET", "/metrics"))[1]
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)
