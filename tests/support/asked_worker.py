"""A worker of Dynamo over an engine that runs when it is let, and what the tests ask of it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.fakes.fake_dynamo import FakeContext, FakeDynamo
from support.fakes.gated_engine import GatedEngine

BASE = "base"
PROMPT = [1, 2, 3]


class AskedWorker:
    """Runs coroutines beside a worker, which is started for each of them."""

    def __init__(self, folder: Path, fake: FakeDynamo, engine: GatedEngine, module: Any) -> None:
        self.folder, self.fake, self.engine, self._module = folder, fake, engine, module
        self.worker: Any = None

    def run(self, coroutine: Callable[[], Awaitable[None]], *words: str) -> None:
        """Start a worker, run a coroutine, and end the worker."""

        async def all_of_it() -> None:
            async with self._started(*words):
                await coroutine()
                await asyncio.to_thread(self.engine.let)

        asyncio.run(asyncio.wait_for(all_of_it(), 60))

    @asynccontextmanager
    async def _started(self, *words: str) -> AsyncIterator[None]:
        argv = [str(self.engine.directory), "--served-model-name", BASE, *words]
        folder = ["--lora-dir", str(self.folder)]
        self.worker, self.config = await self._module.DynamoWorker.from_args(argv + folder)
        self.started = await self.worker.start(7)
        await self.worker.on_endpoint_ready("endpoint")
        try:
            yield
        finally:
            self.engine.let()
            await self.worker.cleanup()
            await self.worker.cleanup()  # any number of times

    async def told(self, update: str, name: object, **body: object) -> dict[str, Any]:
        """Return what it answers to an update."""
        found: dict[str, Any] = await self.worker.engine_update(update, {"lora_name": name, **body})
        return found

    async def answer(
        self, model: str = BASE, most: int = 4, **request: Any
    ) -> list[dict[str, Any]]:
        """Return the chunks of an answer."""
        return [chunk async for chunk in self.chunks(model, most, **request)]

    def chunks(
        self, model: str = BASE, most: int = 4, *, context: object = None, **request: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Return the chunks of a greedy answer as they come."""
        asked: dict[str, Any] = {"model": model, "token_ids": PROMPT}
        asked["stop_conditions"] = {"max_tokens": most, "ignore_eos": True}
        asked["sampling_options"] = {"temperature": 0.0}
        stream: AsyncIterator[dict[str, Any]] = self.worker.generate(
            asked | request, context or FakeContext()
        )
        return stream
