"""Folders that adapters named by a request may come from."""

import os
from collections.abc import Iterable
from pathlib import Path

from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import listed, shown


class AllowedRoots:
    """Real paths of folders; none allows nothing."""

    def __init__(self, folders: Iterable[str | Path]) -> None:
        """Resolve the links of the folders now, so that a later one changes nothing."""
        self._roots = tuple(os.path.realpath(folder) for folder in folders)

    def resolve(self, path: str) -> Path:
        """Return the real path of an adapter; open that, and no link is followed again.

        Raises:
            AdapterError: it is relative, is no path, or lies under none of the folders.
        """
        if not os.path.isabs(path) or "\0" in path:
            raise AdapterError(f"the path of an adapter is {shown(path)}; expected an absolute one")
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(root) for root in self._roots):
            folders = listed(self._roots) or "no folder"
            raise AdapterError(f"{shown(path)} is outside of what requests may load: {folders}")
        return real
