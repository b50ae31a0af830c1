"""ServedNames: which names mean adapters here, and what the engine is told of them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from trt_lora.plugins.errors import AdapterError, UnknownAdapterError
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.adapters.vllm_phrases import vllm_phrases
from trt_lora.runtime.server.engine_process.engine_client import EngineClient
from trt_lora.runtime.server.errors import HttpError


@dataclass(frozen=True)
class Served:
    """An adapter that has a name here."""

    path: str  # as it was given
    created: int = field(default_factory=lambda: int(time.time()))  # unix time
    is_offered: bool = False  # by a folder or a hub; else somebody has loaded it
    is_read: bool = True  # the engine has it; else from its first use on
    parent: str | None = None  # that `/v1/models` says; None: the base model


class ServedNames:
    """The base model's names, and those of adapters; one change of a name at a time."""

    def __init__(self, client: EngineClient, base: Sequence[str], manifest: Manifest) -> None:
        """Begin without adapters.

        Args:
            client: of the engine.
            base: the base model's names.
            manifest: the engine's; its `max_lora_rank` may be less.
        """
        self.base, self.client, self._manifest = tuple(base), client, manifest
        self.adapters: dict[str, Served] = {}
        self.leaving: set[str] = set()  # who unloads them waits for those that use them
        # While somebody changes a name, and no longer: names that were refused are forgotten.
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    def lock(self, name: str) -> asyncio.Lock:
        """Return what is held while the meaning of a name changes."""
        return self._locks.setdefault(name, asyncio.Lock())

    def is_read(self, name: str) -> bool:
        """Whether the engine has what a name means."""
        return name in self.adapters and self.adapters[name].is_read

    def check_free(self, name: str) -> None:
        """Refuse a name whose adapter is still in use, though it is unloaded.

        Raises:
            HttpError: 409.
        """
        if name in self.leaving:
            text = (
                f"The lora adapter '{name}' is being unloaded, and requests still use it; load it "
                "again when that is done, or under another name."
            )
            raise HttpError(409, text)

    async def load(self, name: str, path: Path, **options: bool | int | None) -> dict[str, Any]:
        """Let the engine load an adapter; return what is known of it then.

        Args:
            name: of the adapter, under its lock.
            path: that may be read.
            options: of `AdapterDesk`.

        Raises:
            AdapterError: it cannot be loaded; vLLM's words come first, where it has some.
            StateError: it means another version than expected, or memory has no room.
            BackendError: the engine is gone.
        """
        known_as = await asyncio.to_thread(vllm_phrases, path, self._manifest)
        try:
            rank = self._manifest.max_lora_rank
            found: dict[str, Any] = await self.client.ask(
                "load", name=name, path=str(path), max_rank=rank, **options
            )
        except AdapterError as error:
            raise AdapterError("; ".join([*known_as, str(error)])) from error
        return found

    async def forget(self, name: str, wait_s: float = 0.0) -> int:
        """Take its name from an adapter; from now on no request finds it.

        Args:
            name: of an adapter that is served.
            wait_s: for its memory to be free, most.

        Returns:
            How many bytes of memory that made free.
        """
        if not self.adapters.pop(name).is_read:
            return 0
        try:
            freed: int = await self.client.ask("unload", name=name, wait_s=wait_s)
        except UnknownAdapterError as error:
            raise not_found(name) from error
        return freed

    def unknown(self, model: str) -> HttpError:
        """Return the error of a model that nobody has."""
        aliases = ", ".join(self.base)
        text = f"The model `{model:.200}` does not exist. Valid aliases: {aliases}."
        return HttpError(404, text, "model")


def not_found(name: str) -> HttpError:
    """Return the error of an adapter that shall be changed, and is not there."""
    return HttpError(404, f"The lora adapter '{name:.200}' cannot be found.")
