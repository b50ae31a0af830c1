"""ServedModels: the names that requests may call: the base model's, and those of adapters."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from trt_lora.plugins.errors import AdapterError, LoRAError, StateError, UnknownAdapterError
from trt_lora.runtime.adapters.load import looks_like_adapter
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.adapters.vllm_phrases import vllm_phrases
from trt_lora.runtime.server.engine_process.engine_client import EngineClient
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.store.names import check_name

_LONGEST_NAME = 256  # bytes
_NOT_IN_NAMES = frozenset("\\,")  # a router splits lists of names at commas
_WAIT_S = 60.0  # for those that still use an adapter that is unloaded


@dataclass(frozen=True)
class Served:
    """An adapter that has a name here."""

    path: str  # as it was given
    created: int  # unix time


class ServedModels:
    """Loads, unloads and lists adapters; one change of a name at a time."""

    def __init__(
        self,
        client: EngineClient,
        names: Sequence[str],
        roots: Sequence[Path],
        *,
        root: str,
        manifest: Manifest,
    ) -> None:
        """Serve a base model under some names, and adapters from below some folders.

        Args:
            client: of the engine.
            names: of the base model.
            roots: the folders.
            root: what `/v1/models` says where the base model is.
            manifest: the engine's; its `max_lora_rank` may be less.
        """
        self.base, self._root, self._manifest = tuple(names), root, manifest
        self._client, self._roots = client, [folder.resolve() for folder in roots]
        self._adapters: dict[str, Served] = {}
        # While somebody changes a name, and no longer: names that were refused are forgotten.
        self._locks = WeakValueDictionary[str, asyncio.Lock]()
        self._started = int(time.time())

    def adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request means; None is the base model.

        Raises:
            HttpError: 404; nothing has that name.
        """
        if not model or model in self.base:
            return None
        base, _, adapter = model.partition(":")
        for name in (model, adapter if base in self.base else ""):
            if name in self._adapters:
                return name
        aliases = ", ".join(self.base)
        text = f"The model `{model:.200}` does not exist. Valid aliases: {aliases}."
        raise HttpError(404, text, "model")

    def cards(self, max_model_len: int) -> list[dict[str, Any]]:
        """Return what `/v1/models` lists: the base model first."""
        base = [_card(name, self._started, self._root, None, max_model_len) for name in self.base]
        adapters = [
            _card(name, served.created, served.path, self.base[0], None)
            for name, served in self._adapters.items()
        ]
        return base + adapters

    async def load(
        self, name: str, path: str, *, replace: bool = False, expected_version: int | None = None
    ) -> dict[str, Any]:
        """Check an adapter, read it, give it its name, and return what is known of it.

        Raises:
            HttpError: as vLLM's: 400 for names, 404 where there is nothing, 500 for what cannot be
                taken; 409 where the name means another version.
        """
        self._check_name(name)
        async with self._lock(name):
            if name in self._adapters and not replace and expected_version is None:
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
            known_as = await asyncio.to_thread(vllm_phrases, found, self._manifest.max_lora_rank)
            try:
                known: dict[str, Any] = await self._client.ask(
                    "load",
                    name=name,
                    path=str(found),
                    replace=replace,
                    expected_version=expected_version,
                    max_rank=self._manifest.max_lora_rank,
                )
            except StateError as error:
                raise HttpError(409, str(error)) from error
            except LoRAError as error:
                raise HttpError(500, "; ".join([*known_as, str(error)])) from error
            self._adapters[name] = Served(path, int(time.time()))
            return known

    async def unload(self, name: str, *, wait: bool = False) -> int:
        """Forget an adapter; return how many bytes of memory that made free.

        Args:
            name: of the adapter.
            wait: for those that still use it, a minute at most.

        Raises:
            HttpError: 404; there is none of that name.
        """
        async with self._lock(name):
            if self._adapters.pop(name, None) is None:  # from now on no request finds it
                raise _not_found(name)
            try:
                wait_s = _WAIT_S if wait else 0.0
                freed: int = await self._client.ask("unload", name=name, wait_s=wait_s)
            except UnknownAdapterError as error:
                raise _not_found(name) from error
            return freed

    async def known(self) -> list[dict[str, Any]]:
        """Return what is known of every adapter; see `AdapterDesk`."""
        found: list[dict[str, Any]] = await self._client.ask("adapters")
        return [self._with_path(each) for each in found]

    async def ask(self, what: str, name: str) -> dict[str, Any]:
        """Return what is known of one adapter, after it was pinned or unpinned if that is asked.

        Raises:
            HttpError: 404; there is none of that name. 409; it finds no slot to be pinned in.
        """
        if name not in self._adapters:  # a strength or a blend is no adapter that was loaded
            raise _not_found(name)
        try:
            found: dict[str, Any] = await self._client.ask(what, name=name)
        except UnknownAdapterError as error:
            raise _not_found(name) from error
        except StateError as error:
            raise HttpError(409, str(error)) from error
        return self._with_path(found)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _with_path(self, known: dict[str, Any]) -> dict[str, Any]:
        served = self._adapters.get(known["name"])
        return {**known, "path": served.path if served else None}

    def _check_name(self, name: str) -> None:
        if name in self.base:
            raise HttpError(
                400,
                f"The lora adapter '{name}' conflicts with a served base model.",
                kind="InvalidUserInput",
            )
        is_odd = any(c in _NOT_IN_NAMES or not c.isprintable() for c in name)
        if is_odd or ".." in name or len(name.encode(errors="replace")) > _LONGEST_NAME:
            raise HttpError(
                400,
                "lora_name has characters that a name cannot have (backslash, comma, "
                f"control characters, ..), or more than {_LONGEST_NAME} bytes",
                "lora_name",
            )
        try:
            check_name(name)
        except AdapterError as error:
            raise HttpError(400, str(error), "lora_name") from error

    def _inside(self, path: str) -> Path | None:
        """The path of an adapter below a root, links resolved; None if there is none."""
        try:
            found = Path(path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            return None
        is_inside = any(found.is_relative_to(root) for root in self._roots)
        return found if is_inside and looks_like_adapter(found) else None


def _not_found(name: str) -> HttpError:
    return HttpError(404, f"The lora adapter '{name:.200}' cannot be found.")


def _card(
    name: str, created: int, root: str, parent: str | None, max_model_len: int | None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "trt-lora",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
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
