"""OfferedAdapters: what a folder or a hub has; each is read when it is used for the first time."""

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from trt_lora.plugins.errors import AdapterError, StateError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.adapters.load import looks_like_adapter
from trt_lora.runtime.server.adapters.names_and_paths import check_served_name
from trt_lora.runtime.server.adapters.resolver import Resolver
from trt_lora.runtime.server.adapters.served_names import Served, ServedNames
from trt_lora.runtime.server.errors import HttpError, public

_FIRST_USES = 8  # at a time: half of the engine's threads that read adapters
_LOG = logging.getLogger(__name__)


class OfferedAdapters:
    """Whoever has a name keeps it: what somebody has loaded is not replaced by what is offered."""

    def __init__(self, names: ServedNames) -> None:
        """Begin without resolvers."""
        self.resolvers: list[Resolver] = []  # asked in this order for names that nothing has
        self._names = names
        self._refused: dict[str, str] = {}  # what was offered under a name, and why it is not taken
        self._coming: dict[str, asyncio.Task[None]] = {}  # used for the first time now
        self._reading = asyncio.Semaphore(_FIRST_USES)

    @property
    def refused(self) -> list[dict[str, str]]:
        """The names under which something is offered that is not taken, and why."""
        return [
            {"name": name.encode(errors="replace").decode(), "error": public(why)}  # a file's name
            for name, why in self._refused.items()
            if not self.is_unread(name)  # it has changed since, and is tried again
        ]

    def are_read(self, names: Iterable[str]) -> bool:
        """Whether the engine has all of them."""
        return all(self._names.is_read(name) for name in names)

    async def ready(self, names: Iterable[str]) -> None:
        """Read those adapters that are used for the first time; ask resolvers for unknown ones.

        Raises:
            HttpError: 404; there is none of a name. 400; there is, and it cannot be loaded.
            BackendError: a resolver cannot be asked, or the engine is gone.
        """
        for name in names:
            if name not in self._names.adapters:
                await self._resolve(name)
            if not self._names.is_read(name):
                task = self._coming.get(name)
                if task is None:  # it goes on when those who wait for it are gone
                    task = self._coming[name] = asyncio.create_task(self._read(name))
                    task.add_done_callback(partial(self._has_come, name))
                await asyncio.shield(task)

    async def offer(self, name: str, path: Path) -> None:
        """Let a name mean an adapter from its next use on, unless somebody has loaded another.

        What was offered before, and is in memory, is replaced now; it stays where that fails.

        Args:
            name: of the adapter.
            path: where it lies, links resolved.

        Raises:
            HttpError: 400; it cannot have that name. 409; it is being unloaded.
        """
        check_served_name(name, self._names.base)
        async with self._names.lock(name):
            self._names.check_free(name)
            served = self._names.adapters.get(name)
            if served is None or not served.is_read:
                self._names.adapters[name] = _unread(path)
            elif served.is_offered:
                await self._renew(name, path)

    async def withdraw(self, name: str, why: str = "") -> None:
        """Unload what was offered under a name; what is there now is refused, if there is a why."""
        async with self._names.lock(name):
            served = self._names.adapters.get(name)
            if served is not None and served.is_offered:
                await self._names.forget(name)
        if why:
            self.refuse(name, why)
        else:
            self._refused.pop(name, None)

    def refuse(self, name: str, why: str) -> None:
        """Note, and say once, that what is offered under a name is not taken, as it is now."""
        if self.is_unread(name):
            del self._names.adapters[name]
        if self._refused.get(name) != why:
            _LOG.warning("adapter %s is not served: %s", shown(name), why)
        self._refused[name] = why

    async def close(self) -> None:
        """End what the resolvers do, and who waits for a first use."""
        for resolver in self.resolvers:
            await resolver.close()
        for task in self._coming.values():
            task.cancel()

    def is_unread(self, name: str) -> bool:
        """Whether it is offered, and was not used yet."""
        return name in self._names.adapters and not self._names.is_read(name)

    async def _resolve(self, name: str) -> None:
        async with self._names.lock(name):
            if name in self._names.adapters:
                return
            for resolver in self.resolvers:
                path = await resolver.resolve(self._names.base[0], name)
                if path is not None and name not in self._names.leaving:
                    self._names.adapters[name] = _unread(path)
                    return
        raise self._names.unknown(name)

    async def _read(self, name: str) -> None:
        """Let the engine load what is offered under a name."""
        async with self._names.lock(name), self._reading:
            served = self._names.adapters.get(name)
            if served is not None and served.is_read:
                return
            path = Path(served.path if served else "")
            if served is None or not await asyncio.to_thread(looks_like_adapter, path):
                self._names.adapters.pop(name, None)  # it has gone since the last look
                raise self._names.unknown(name)
            try:
                await self._load(name, path)
            except AdapterError as error:
                self.refuse(name, str(error))
                text = f"LoRA adapter '{name}' was found but could not be loaded."
                raise HttpError(400, text, "model") from error
            self._refused.pop(name, None)
            self._names.adapters[name] = dataclasses.replace(served, is_read=True)

    async def _renew(self, name: str, path: Path) -> None:
        """Replace what is in memory; what lies on disk alone is read when it is wanted."""
        try:
            is_on_disk = (await self._names.client.ask("adapter", name=name))["level"] == "disk"
            await self._load(name, path, replace=True, lazily=is_on_disk)
        except AdapterError as error:
            self.refuse(name, str(error))
        else:
            self._refused.pop(name, None)
            self._names.adapters[name] = Served(str(path), is_offered=True)

    async def _load(self, name: str, path: Path, **options: bool) -> None:
        try:
            await self._names.load(name, path, **options)
        except StateError:  # others hold all memory: its first request waits for room, in its turn
            await self._names.load(name, path, **options | {"lazily": True})

    def _has_come(self, name: str, task: asyncio.Task[None]) -> None:
        del self._coming[name]
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more


def _unread(path: Path) -> Served:
    return Served(str(path), is_offered=True, is_read=False)
