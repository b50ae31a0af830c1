"""FolderFollower: offers what lies in a folder of adapters, for as long as it lies there."""

import asyncio
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from trt_lora.plugins.errors import AdapterError, ConfigError, StateError
from trt_lora.runtime.adapters.fitting.fit import preview_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.adapters.adapter_folder import AdapterFolder, Found
from trt_lora.runtime.server.adapters.offered_adapters import OfferedAdapters
from trt_lora.runtime.server.errors import HttpError

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class FolderFollower:
    """Looks into the folder again and again, and acts on what has changed since the last look.

    So what was unloaded over HTTP stays away until its files change. A folder that cannot be read
    takes nothing away: what was read from it is served on. Nor does one look without a name, which
    may fall between the two renames of a replacement. It is looked at in threads of its own:
    a file system that hangs holds up nobody else.
    """

    def __init__(
        self, folder: AdapterFolder, offers: OfferedAdapters, manifest: Manifest, refresh_s: float
    ) -> None:
        """Take what is followed, and who is told.

        Args:
            folder: that is followed.
            offers: to the names of the server.
            manifest: that adapters have to fit.
            refresh_s: seconds from one look to the next.

        Raises:
            ConfigError: that is no number of seconds.
        """
        if not 0 < refresh_s < math.inf:
            raise ConfigError(f"--lora-dir-refresh is {refresh_s}, expected seconds, more than 0")
        self._folder, self._offers = folder, offers
        self._manifest, self._refresh_s = manifest, refresh_s
        self._seen: dict[str, Found] = {}
        self._missing = frozenset[str]()  # at the last look alone
        self._taking: str | None = None  # what is offered at this moment
        self._is_away = False
        self._threads = ThreadPoolExecutor(2, "trt-lora-folder")
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Offer what is there, of which nothing is read now, and follow it from then on.

        Raises:
            ConfigError: there is no such folder.
        """
        await self._look()
        if self._is_away:
            raise ConfigError(f"--lora-dir: {self._folder.path} cannot be read; name a folder")
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Follow it no more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def resolve(self, base: str, name: str) -> Path | None:
        """Return what was published under a name since the last look; see `Resolver`."""
        del base
        try:
            found = await self._run(self._folder.find, name)
        except OSError:
            return None
        if found is None or found.fault:
            return None
        if self._seen.get(name) == found and name != self._taking:
            return None  # it was refused, or unloaded
        self._seen[name] = found
        return found.path

    async def _follow(self) -> None:
        checked: dict[str, Found] = {}
        while True:
            try:
                for name, found in list(self._seen.items()):
                    if checked.get(name) != found:
                        checked[name] = found
                        await self._check(name, found)
                checked = {name: checked[name] for name in checked.keys() & self._seen.keys()}
                await asyncio.sleep(self._refresh_s)
                await self._look()
            except Exception:
                _LOG.exception("a look into the folder of adapters failed; it is followed on")
                await asyncio.sleep(self._refresh_s)

    async def _look(self) -> None:
        before = list(self._seen)  # what a request finds meanwhile is not gone
        try:
            now = await self._run(self._folder.look)
        except OSError as error:
            if not self._is_away:
                _LOG.warning("the folder of adapters is away, its adapters stay: %s", error)
            self._is_away = True
            return
        if self._is_away:
            _LOG.warning("the folder of adapters is there again")
        self._is_away = False
        missing = frozenset(before) - now.keys()
        for name in missing & self._missing:
            del self._seen[name]
            await self._offers.withdraw(name)
        self._missing = missing
        for name, found in now.items():
            if self._seen.get(name) != found:
                self._seen[name] = found
                await self._take(name, found)

    async def _take(self, name: str, found: Found) -> None:
        """Offer what is new, or other than before."""
        self._taking = name
        try:
            if found.fault:
                await self._offers.withdraw(name, found.fault)
            else:
                await self._offers.offer(name, found.path)
        except HttpError as error:
            if error.status == 409:  # it is being unloaded: the next look is soon enough
                del self._seen[name]
            else:
                self._offers.refuse(name, str(error))
        except StateError:  # a pin finds no slot now
            del self._seen[name]
        finally:
            self._taking = None

    async def _check(self, name: str, found: Found) -> None:
        """Look at the headers of what nobody has used yet: a bad adapter is known by then."""
        if not self._offers.is_unread(name):
            return
        fault = await self._run(_fault, found.path, self._manifest)
        # What was removed or replaced meanwhile is no bad adapter: the next look sees it.
        if fault and await self._run(self._folder.find, name) == self._seen.get(name) == found:
            self._offers.refuse(name, fault)

    async def _run(self, do: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, do, *args)


def _fault(path: Path, manifest: Manifest) -> str:
    """Why an engine cannot take an adapter, as far as its headers tell; empty if it can."""
    try:
        preview_adapter(load_adapter(path, manifest), manifest)
    except AdapterError as error:
        return str(error)
    return ""
