"""AdapterFolder: what lies in a folder of adapters, by name, at a moment."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trt_lora.runtime.adapters.load import ADAPTER_FILES, file_versions, looks_like_adapter
from trt_lora.runtime.server.adapters.names_and_paths import path_inside


@dataclass(frozen=True)
class Found:
    """What has a name in the folder; equal as long as its files are the same ones."""

    path: Path  # links resolved
    files: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # inode, size, time of each
    fault: str = ""  # why it is no adapter


class AdapterFolder:
    """The first level of a folder: folders of adapters, and adapters that are a file.

    What begins with a dot is not looked at: what is not whole yet can lie there.
    """

    def __init__(self, path: Path, roots: Sequence[Path]) -> None:
        """Take a folder, or a link that may be moved, and the folders to which links in it lead."""
        self.path, self._roots = path, [root.resolve() for root in roots]
        self._device: int | None = None  # where it lay when something was in it

    def look(self) -> dict[str, Found]:
        """Return all that is there, by name.

        Raises:
            OSError: the folder cannot be read, is empty because its device is gone, or was moved
                meanwhile.
        """
        home = self.path.resolve(strict=True)
        before = home.stat()
        found = {name: self._find(home, name) for name in sorted(os.listdir(home))}
        if home.stat().st_ino != before.st_ino:
            raise OSError(f"{home} was replaced while it was looked at")
        if not found and self._device not in (None, before.st_dev):
            raise OSError(f"{home} is empty, and on another device: it was unmounted")
        self._device = before.st_dev if found else self._device
        return {name: each for name, each in found.items() if each is not None}

    def find(self, name: str) -> Found | None:
        """Return what has a name; None for nothing, and for a file that is none of an adapter.

        Raises:
            OSError: the folder cannot be read.
        """
        return self._find(self.path.resolve(strict=True), name)

    def _find(self, home: Path, name: str) -> Found | None:
        if name.startswith(".") or "/" in name:
            return None
        place = home / name
        path = path_inside(place, [home, *self._roots])
        if path is None:
            fault = "is a link to nothing, or out of the folder"
            return Found(place, fault=fault) if place.is_symlink() else None
        if not path.is_dir() and path.suffix not in ADAPTER_FILES:
            return None
        try:
            # Without the time of changes to the inode: a backup by hard links is no new adapter.
            files = {file: version[:3] for file, version in file_versions(path).items()}
        except OSError as error:
            return Found(path, fault=f"cannot be read: {error.strerror}")
        return Found(
            path, files, "" if looks_like_adapter(path) else "holds no adapter, or not yet"
        )
