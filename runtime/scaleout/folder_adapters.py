"""FolderAdapters: adapters of a folder that several engines share, each loaded when asked for."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from trt_lora.plugins.errors import AdapterError, UnknownAdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.server.adapters.adapter_folder import AdapterFolder, Found
from trt_lora.runtime.server.adapters.names_and_paths import check_served_name, path_inside
from trt_lora.runtime.store.store import AdapterStore


class FolderAdapters:
    """A name means what lies under it in the folder when a request comes, on every engine.

    What was loaded is served on where it is gone from the folder, because a look may fall between
    the two renames of a replacement. What was never loaded is an error, and so is what is there and
    cannot be loaded.
    """

    def __init__(
        self, adapters: AdapterStore, folder: AdapterFolder | None, bases: Sequence[str]
    ) -> None:
        """Take the store of an engine, the folder (None: no adapters), and the base's names."""
        self._adapters, self._folder, self._bases = adapters, folder, bases
        self._loaded: dict[str, Found] = {}
        self._users, self._leaving = Counter[str](), set[str]()
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # while somebody loads that name

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[None]:
        """Load an adapter, unless it is; it is not unloaded before the end of the block.

        Raises:
            AdapterError: it cannot be loaded, or the folder cannot be read.
            UnknownAdapterError: the folder has none of that name.
        """
        self._users[name] += 1
        try:
            async with self._locks.setdefault(name, asyncio.Lock()):
                await asyncio.to_thread(self._load, name)
            yield
        finally:
            self._users[name] -= 1
            self._drop_unused(name)

    def checked(self, name: object, source: object = None) -> str:
        """Return a name; refuse one, or a place, by which other engines find another adapter.

        Args:
            name: of an adapter that shall come or go.
            source: `{"uri": ...}`, where it shall lie; None is where the folder has it.

        Raises:
            HttpError: it cannot be a name, or is the base model's.
            AdapterError: it is another place, or none that the folder's links may lead to.
        """
        if not isinstance(name, str) or not name:
            raise AdapterError(f"lora_name is {shown(name)}, expected the name of an adapter")
        check_served_name(name, self._bases)
        uri = source.get("uri") if isinstance(source, Mapping) else source
        if uri is None:
            return name
        place = path_inside(str(uri).removeprefix("file://"), [Path("/")])
        if place is None or (found := self._find(name)) is None or found.path != place:
            raise AdapterError(
                f"source.uri is {shown(uri)}, but adapter {name!r} is what lies under that name in "
                "--lora-dir, where every worker finds it; put it there"
            )
        return name

    def keep(self, name: str) -> None:
        """Take back that an adapter shall be unloaded."""
        self._leaving.discard(name)

    def unload(self, name: str) -> None:
        """Unload an adapter once nobody uses it."""
        self._leaving.add(name)
        self._drop_unused(name)

    def _drop_unused(self, name: str) -> None:
        if self._users[name]:
            return
        del self._users[name]
        if name in self._leaving:
            self._leaving.remove(name)
            if self._loaded.pop(name, None) is not None:
                self._adapters.unload(name)

    def _load(self, name: str) -> None:
        found = self._find(name)
        if found is None or found.fault:
            if name in self._loaded:
                return
            why = "has none" if found is None else f"has what {found.fault}"
            raise UnknownAdapterError(f"adapter {name!r} is not loaded, and --lora-dir {why}")
        if self._loaded.get(name) != found:
            try:
                self._adapters.load(name, found.path, replace=True)
            except AdapterError as error:
                raise AdapterError(f"adapter {name!r} cannot be loaded: {error}") from error
            self._loaded[name] = found

    def _find(self, name: str) -> Found | None:
        if self._folder is None:
            raise UnknownAdapterError(f"adapter {name!r} is not loaded: there is no --lora-dir")
        try:
            return self._folder.find(name)
        except OSError as error:
            if name in self._loaded:
                return None
            raise AdapterError(f"--lora-dir cannot be read: {error.strerror}") from error
