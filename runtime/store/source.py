"""Sources that an adapter can be read from again, and how it is fitted to its engine."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trt_lora.plugins.errors import ChangedAdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.fit import Fitted, fit_adapter, preview_adapter
from trt_lora.runtime.adapters.load import files_fingerprint, load_adapter
from trt_lora.runtime.manifest import Manifest


@dataclass(frozen=True)
class Fit:
    """How adapters are fitted to one engine."""

    manifest: Manifest
    rank_multiple: int  # as in `Executor`; 1 where slots have zeros behind the rank
    directory: Path | None = None  # of the engine, whose weights DoRA needs

    def preview(self, adapter: Adapter, *, strict: bool) -> Coverage:
        """Check all but the values; see `preview_adapter`."""
        return preview_adapter(
            adapter, self.manifest, strict=strict, rank_multiple=self.rank_multiple
        )

    def read(self, adapter: Adapter, *, strict: bool) -> Fitted:
        """Read, check and cast the values; see `fit_adapter`."""
        return fit_adapter(
            adapter,
            self.manifest,
            strict=strict,
            rank_multiple=self.rank_multiple,
            directory=self.directory,
        )


Keep = Callable[[Any], AbstractContextManager[Any]]  # from an `Entry` to what is `Loaded` of it


class Source(Protocol):
    """What an adapter can be read from again."""

    def preview(self) -> Coverage:
        """Check all but the values.

        Raises:
            AdapterError: it cannot be read, or the engine cannot take it.
        """
        ...

    def read(self, keep: Keep) -> Fitted:
        """Read, check and cast the values.

        Args:
            keep: brings another adapter into memory, and keeps it there meanwhile.

        Raises:
            AdapterError: as `preview`; or the files are others than were registered.
            StateError: what it is made of finds no room in memory.
        """
        ...

    def content_hash(self, fitted: Fitted) -> str:
        """Return what tells its values, as they were read, from others."""
        ...


@dataclass(frozen=True)
class FileSource:
    """Files of an adapter."""

    fit: Fit
    path: Path
    strict: bool
    fingerprint: str = ""  # of the files when they were registered, by `files_fingerprint`

    def open(self) -> Adapter:
        """Read the headers.

        Raises:
            AdapterError: it cannot be read.
        """
        return load_adapter(self.path, self.fit.manifest)

    def preview(self) -> Coverage:
        """See `Source`."""
        return self.fit.preview(self.open(), strict=self.strict)

    def read(self, keep: Keep) -> Fitted:
        """See `Source`."""
        del keep
        if self.fingerprint and files_fingerprint(self.path) != self.fingerprint:
            raise ChangedAdapterError(
                f"{self.path} changed since it was registered; load it with replace=True, or "
                "unload it and register it again"
            )
        return self.fit.read(self.open(), strict=self.strict)

    def content_hash(self, fitted: Fitted) -> str:
        """See `Source`."""
        return content_hash(fitted)


def content_hash(fitted: Fitted) -> str:
    """Return the SHA-256 over names, dtypes, shapes and values as the engine takes them.

    Equal for adapters that make the same answers, whatever their files look like.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(fitted.tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0".encode())
        digest.update(tensor.read_storage().view(np.uint8).data)
    return digest.hexdigest()
