"""AdapterUpdates: adapters that a worker publishes, and takes back, when it is told to."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from trt_lora.plugins.errors import LoRAError, UnknownAdapterError
from trt_lora.runtime.scaleout.folder_adapters import FolderAdapters
from trt_lora.runtime.server.errors import HttpError

Announce = Callable[[str], Awaitable[None]]


class AdapterUpdates:
    """Answers Dynamo's updates; a name is published once it is loaded, and unloaded once retracted.

    What a front end has sent before it knew is still answered.
    """

    def __init__(
        self,
        adapters: FolderAdapters,
        *,
        publish: Announce,
        retract: Announce,
        number_of: Callable[[str], int],
    ) -> None:
        """Begin with no adapter published.

        Args:
            adapters: that the worker has.
            publish: tells the front ends of a name.
            retract: takes it back.
            number_of: of a name, in answers.
        """
        self._adapters, self._number_of = adapters, number_of
        self._publish, self._retract = publish, retract
        self._published: set[str] = set()
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # while a name comes or goes
        self._answers = {"load_lora": self._load, "unload_lora": self._unload}

    async def answer(self, update: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an update; an answer of status "error" says why nothing has changed."""
        if update == "list_loras":
            loras = {name: self._number_of(name) for name in sorted(self._published)}
            return {"status": "success", "loras": loras, "count": len(loras)}
        name = body.get("lora_name")
        try:
            name = self._adapters.checked(name, body.get("source"))
            async with self._locks.setdefault(name, asyncio.Lock()):
                message = await self._answers[update](name)
            done = {"status": "success", "message": message, "lora_name": name}
            return done | {"lora_id": self._number_of(name)}
        except (LoRAError, HttpError) as error:
            return {"status": "error", "message": str(error), "lora_name": name}

    async def _load(self, name: str) -> str:
        async with self._adapters.using(name):
            if name not in self._published:
                await self._publish(name)
                self._published.add(name)
            self._adapters.keep(name)
        return f"adapter {name!r} is loaded and published"

    async def _unload(self, name: str) -> str:
        if name not in self._published:
            known = ", ".join(sorted(self._published)) or "none"
            raise UnknownAdapterError(f"adapter {name!r} is not published by this worker: {known}")
        await self._retract(name)
        self._published.remove(name)
        self._adapters.unload(name)
        return f"adapter {name!r} is retracted, and unloaded when its last answer has ended"
