"""ServedModels: the names that requests may call: the base model's, and those of adapters."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import AdapterError, LoRAError, StateError, UnknownAdapterError
from trt_lora.runtime.engine import Engine
from trt_lora.runtime.server.errors import HttpError

_LONGEST_NAME = 256
_NOT_IN_NAMES = frozenset('\\,\0"')


@dataclass(frozen=True)
class Served:
    """An adapter that has a name here."""

    path: str  # as it was given
    created: int  # unix time


class ServedModels:
    """Loads, unloads and lists adapters; one change of a name at a time."""

    def __init__(self, engine: Engine, names: Sequence[str], roots: Sequence[Path]) -> None:
        """Serve a base model under some names, and adapters from below some folders."""
        self.base = tuple(names)
        self._engine, self._roots = engine, [root.resolve() for root in roots]
        self._adapters: dict[str, Served] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._started = int(time.time())

    def adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request means; None is the base model.

        Raises:
            HttpError: 404; nothing has that name.
        """
        if not model or model in self.base:
            return None
        base, _, adapter = model.partition(":")
        name = adapter if adapter and base in self.base else model
        if name not in self._engine.adapters.names:
            aliases = ", ".join(self.base)
            raise HttpError(
                404, f"The model `{model}` does not exist. Valid aliases: {aliases}.", "model"
            )
        return name

    def cards(self) -> list[dict[str, Any]]:
        """Return what `/v1/models` lists: the base model first."""
        root = str(self._engine.directory)
        cards = [self._card(name, self._started, root, None) for name in self.base]
        for name in self._engine.adapters.names:
            served = self._adapters.get(name, Served(name, self._started))
            cards.append(self._card(name, served.created, served.path, self.base[0]))
        return cards

    async def load(
        self, name: str, path: str, *, replace: bool = False, expected_version: int | None = None
    ) -> None:
        """Check an adapter, read it, and give it its name.

        Raises:
            HttpError: as vLLM's: 400 for names, 404 where there is nothing, 500 for what cannot be
                taken.
        """
        self._check_name(name)
        async with self._locks[name]:
            if name in self._engine.adapters.names and not replace:
                raise HttpError(
                    400,
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    kind="InvalidUserInput",
                )
            found = await asyncio.to_thread(self._inside, path)
            if found is None:
                text = f"Loading lora {name} failed: No adapter found for {Path(path).name}"
                raise HttpError(404, text)
            try:
                await asyncio.to_thread(
                    self._engine.adapters.load,
                    name,
                    found,
                    replace=replace,
                    expected_version=expected_version,
                )
            except StateError as error:
                raise HttpError(409, str(error)) from error
            except LoRAError as error:
                raise HttpError(500, str(error)) from error
            self._adapters[name] = Served(path, int(time.time()))

    async def unload(self, name: str) -> None:
        """Forget an adapter.

        Raises:
            HttpError: 404; there is none of that name.
        """
        async with self._locks[name]:
            try:
                self._engine.adapters.unload(name)
            except UnknownAdapterError as error:
                text = f"The lora adapter '{name}' cannot be found."
                raise HttpError(404, text) from error
            self._adapters.pop(name, None)

    def _check_name(self, name: str) -> None:
        if name in self.base:
            raise HttpError(
                400,
                f"The lora adapter '{name}' conflicts with a served base model.",
                kind="InvalidUserInput",
            )
        is_odd = any(c in _NOT_IN_NAMES or not c.isprintable() for c in name)
        if is_odd or ".." in name or len(name) > _LONGEST_NAME:
            raise HttpError(
                400, "lora_name has characters that a name cannot have, or too many", "lora_name"
            )

    def _inside(self, path: str) -> Path | None:
        """A path below a root, links resolved; None if it is elsewhere, or is not there."""
        try:
            found = Path(path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            return None
        return found if any(found.is_relative_to(root) for root in self._roots) else None

    def _card(self, name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
        is_base = parent is None
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "trt-lora",
            "root": root,
            "parent": parent,
            "max_model_len": self._engine.manifest.max_seq_len if is_base else None,
            "permission": [],
        }


async def load_at_start(models: ServedModels, modules: Sequence[tuple[str, str]]) -> None:
    """Load the adapters of `--lora-modules`.

    Raises:
        AdapterError: one cannot be loaded.
    """
    for name, path in modules:
        try:
            await models.load(name, path)
        except HttpError as error:
            raise AdapterError(f"--lora-modules {name}: {error}") from error
