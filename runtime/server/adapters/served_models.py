"""ServedModels: the models that requests may call: the base model, and adapters by their names."""

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from trt_lora.plugins.errors import (
    AdapterError,
    BackendError,
    ConfigError,
    LoRAError,
    StateError,
    UnknownAdapterError,
)
from trt_lora.runtime.adapters.load import looks_like_adapter
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.adapters.names_and_paths import check_served_name, path_inside
from trt_lora.runtime.server.adapters.offered_adapters import OfferedAdapters
from trt_lora.runtime.server.adapters.served_names import Served, ServedNames, not_found
from trt_lora.runtime.server.engine_process.engine_client import EngineClient
from trt_lora.runtime.server.errors import HttpError

_WAIT_S = 60.0  # for those that still use an adapter that is unloaded


class NamedPath(NamedTuple):
    """An adapter that is loaded at the start."""

    name: str
    path: str
    parent: str | None = None  # what `/v1/models` says; None: the base model

    @classmethod
    def of(cls, text: str) -> Self:
        """Read `NAME=PATH`, or vLLM's JSON.

        Raises:
            ConfigError: it is neither, or says that the weights are those of experts.
        """
        try:
            if not text.startswith("{"):
                return cls(*text.split("=", 1))
            given = json.loads(text)
            made = cls(given["name"], given["path"], given.get("base_model_name"))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--lora-modules has {text!r}, expected NAME=PATH, or JSON with name and path"
            ) from error
        if given.get("is_3d_lora_weight"):
            raise ConfigError(f"--lora-modules has {text!r}: no weights of experts are taken")
        return made


class ServedModels:
    """Finds, loads, unloads and lists adapters, as requests ask for it."""

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
        self._names = ServedNames(client, names, manifest)
        self.offers = OfferedAdapters(self._names)
        self.base, self._adapters = self._names.base, self._names.adapters
        self._client, self._roots = client, [folder.resolve() for folder in roots]
        self._root, self._started = root, int(time.time())

    @property
    def loaded(self) -> dict[str, str]:
        """The paths, as they were given, of the adapters that somebody has loaded, by name."""
        return {n: served.path for n, served in self._adapters.items() if not served.is_offered}

    def adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request means; None is the base model.

        Whether it exists may be for `offers.ready` to find out.

        Raises:
            HttpError: 404; nothing has that name.
        """
        if not model or model in self.base:
            return None
        base, _, adapter = model.partition(":")
        names = [model, adapter] if base in self.base else [model]
        for name in names:
            if name in self._adapters:
                return name
        if not self.offers.resolvers:
            raise self._names.unknown(model)
        try:
            check_served_name(names[-1], self.base)
        except HttpError as error:
            raise self._names.unknown(model) from error
        return names[-1]

    def cards(self, max_model_len: int) -> list[dict[str, Any]]:
        """Return what `/v1/models` lists: the base model first."""
        base = [_card(name, self._started, self._root, None, max_model_len) for name in self.base]
        adapters = [
            _card(name, served.created, served.path, served.parent or self.base[0], None)
            for name, served in self._adapters.items()
        ]
        return base + adapters

    async def load(
        self,
        name: str,
        path: str,
        *,
        replace: bool = False,
        expected_version: int | None = None,
        parent: str | None = None,
    ) -> dict[str, Any]:
        """Check an adapter, read it, give it its name, and return what is known of it.

        Raises:
            HttpError: as vLLM's: 400 for names, 404 where there is nothing, 500 for what cannot be
                taken; 409 where the name means another version, or is being unloaded; 503 where
                the engine is gone.
        """
        check_served_name(name, self.base)
        async with self._names.lock(name):
            self._names.check_free(name)
            if name in self._adapters and not replace and expected_version is None:
                raise HttpError(
                    400,
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    kind="InvalidUserInput",
                )
            found = await asyncio.to_thread(self._inside, path)
            if found is None:
                text = f"Loading lora {name} failed: No adapter found for {Path(path).name:.200}"
                raise HttpError(404, text)
            try:
                known = await self._names.load(
                    name, found, replace=replace, expected_version=expected_version
                )
            except StateError as error:
                raise HttpError(409, str(error)) from error
            except LoRAError as error:
                status = 503 if isinstance(error, BackendError) else 500
                raise HttpError(status, str(error)) from error
            self._adapters[name] = Served(path, parent=parent)
            return known

    async def unload(self, name: str, *, wait: bool = False) -> int:
        """Forget an adapter; return how many bytes of memory that made free.

        Args:
            name: of the adapter.
            wait: for those that still use it, a minute at most; it cannot be loaded meanwhile.

        Raises:
            HttpError: 404; there is none of that name.
        """
        async with self._names.lock(name):
            if name not in self._adapters:
                raise not_found(name)
            if not wait:
                return await self._names.forget(name)
            self._names.leaving.add(name)
        try:
            return await self._names.forget(name, _WAIT_S)
        finally:
            self._names.leaving.discard(name)

    async def known(self) -> list[dict[str, Any]]:
        """Return what is known of every adapter; see `AdapterDesk`."""
        found: list[dict[str, Any]] = await self._client.ask("adapters")
        read = [self._with_path(each) for each in found]
        return read + [self._unread(name) for name, s in self._adapters.items() if not s.is_read]

    async def ask(self, what: str, name: str) -> dict[str, Any]:
        """Return what is known of one adapter, after it was pinned or unpinned if that is asked.

        Raises:
            HttpError: 404; there is none of that name. 409; it finds no slot to be pinned in.
                400; that is its first use, and it cannot be loaded.
        """
        if name not in self._adapters:  # a strength or a blend is no adapter that was loaded
            raise not_found(name)
        if what == "pin":
            await self.offers.ready([name])
        elif not self._names.is_read(name):
            return self._unread(name)
        try:
            found: dict[str, Any] = await self._client.ask(what, name=name)
        except UnknownAdapterError as error:
            raise not_found(name) from error
        except StateError as error:
            raise HttpError(409, str(error)) from error
        return self._with_path(found)

    def _with_path(self, known: dict[str, Any]) -> dict[str, Any]:
        served = self._adapters.get(known["name"])
        return {**known, "path": served.path if served else None}

    def _unread(self, name: str) -> dict[str, Any]:
        """What is known of an adapter that the engine does not have yet."""
        nothing = {"version": 0, "sha256": "", "rank": 0, "bytes": 0, "level": "disk"}
        nothing |= {"slot": None, "leases": 0, "pinned": False, "milliseconds": 0.0}
        return self._with_path({"name": name, **nothing, "warnings": []})

    def _inside(self, path: str) -> Path | None:
        """The path of an adapter below a root; None if there is none."""
        found = path_inside(path, self._roots)
        return found if found is not None and looks_like_adapter(found) else None


def _card(
    name: str, created: int, root: str, parent: str | None, max_model_len: int | None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [_permission(created)],
    }


def _permission(created: int) -> dict[str, Any]:
    """What OpenAI's first clients looked for; as vLLM has it."""
    return {
        "id": f"modelperm-{uuid.uuid4().hex}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


async def load_at_start(
    models: ServedModels, modules: Sequence[NamedPath | tuple[str, str]]
) -> None:
    """Load the adapters of `--lora-modules`.

    Raises:
        AdapterError: one cannot be loaded.
    """
    for module in itertools.starmap(NamedPath, modules):
        try:
            await models.load(module.name, module.path, parent=module.parent)
        except HttpError as error:
            raise AdapterError(f"--lora-modules {module.name}: {error}") from error
