"""Persistent runtime cache of the kernels that TensorRT-RTX compiles just in time."""

import hashlib
import logging
from pathlib import Path
from typing import Any

from trt_lora.plugins.atomic_files import publish_file

RUNTIME_CACHE_FILE = "runtime.cache"

_LOG = logging.getLogger(__name__)


class RuntimeCache:
    """A file of compiled kernels: read when an engine is opened, written when it is closed.

    It only saves time, so that nothing about it is an error: a file that is damaged, or of another
    GPU, driver or TensorRT-RTX (which checks all that), is ignored and replaced; where no file can
    be written there is none.
    """

    def __init__(self, path: Path, cache: Any) -> None:
        """Fill `cache`, an empty `IRuntimeCache`, from the file."""
        self.cache = cache
        self._path = path
        self._stored = self._load()  # digest of what the file holds

    def save(self) -> None:
        """Write the file, whole, if it would not stay the same."""
        try:
            data = bytes(self.cache.serialize())
            if data and _digest(data) != self._stored:
                with publish_file(self._path) as path:
                    path.write_bytes(data)
        except (OSError, RuntimeError, TypeError) as error:  # None where TensorRT-RTX fails
            _LOG.info("%s is not written: %s", self._path, str(error))

    def _load(self) -> bytes:
        if not self._path.exists():
            return b""
        why = "it is damaged, or of another GPU, driver or TensorRT-RTX"
        try:
            data = self._path.read_bytes()
            if data and self.cache.deserialize(data):
                return _digest(data)
        except (OSError, RuntimeError) as error:
            why = str(error)
        _LOG.info("%s is ignored, and written anew at the end: %s", self._path, why)
        return b""


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
