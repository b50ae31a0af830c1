"""Size-limited LRU disk cache: bytes by key, one file per entry."""

import contextlib
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.atomic_files import publish_file

_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class FileCache:
    """An LRU disk cache; best effort: an I/O error is a miss, never an exception.

    Any number of processes may share the directory. An entry appears whole; one that is damaged
    counts as absent. The files are `max_bytes` in all after every `put`, whatever was there before;
    an entry larger than that is not kept.
    """

    directory: Path
    max_bytes: int

    def get(self, key: str) -> bytes | None:
        """Return what was put under the key, or None where nothing is or it is damaged."""
        path = self.directory / key
        try:
            kept = path.read_bytes()
        except OSError:
            return None
        digest, content = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        with contextlib.suppress(OSError):  # of another user, or on a disk that takes no writes
            os.utime(path)
        return content

    def put(self, key: str, content: bytes) -> None:
        """Keep the content under the key, a valid file name, if the disk takes it."""
        with contextlib.suppress(OSError):
            with publish_file(self.directory / key) as path:
                path.write_bytes(hashlib.sha256(content).digest() + content)
            self._evict()

    def _evict(self) -> None:
        entries = [entry for entry in os.scandir(self.directory) if entry.is_file()]
        files = sorted((e.stat().st_mtime_ns, e.stat().st_size, e.path) for e in entries)
        excess = sum(size for _, size, _ in files) - self.max_bytes
        for _, size, path in files:
            if excess <= 0:
                return
            os.unlink(path)
            excess -= size
