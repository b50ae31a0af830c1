"""File sizes and hashes in a manifest, and their comparison with a file."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.errors import ManifestError

BLOCK = 4096  # bytes of a block of the sample
BLOCKS = 384  # in the sample of a file that has more

SIZE, FAST, FULL = "size", "fast", "full"  # how closely a file is looked at


@dataclass(frozen=True)
class FileRecord:
    """One file of the engine directory."""

    size_bytes: int
    sha256: str
    sample: str = ""  # `sampled_sha256` where it is another


def file_record(path: Path) -> FileRecord:
    """Return size and hashes of a file."""
    whole, sample = sha256_of(path), sampled_sha256(path)
    return FileRecord(path.stat().st_size, whole, "" if sample == whole else sample)


def sampled_sha256(path: Path) -> str:
    """Return the SHA-256 of 384 blocks of 4096 bytes, evenly spread from the first to the last.

    Block i starts at byte `i * (size - 4096) // 383`. A file of at most 1.5 MiB is hashed whole. So
    a changed stretch of 1/383 of the file always touches a block; a shorter one, of any length L,
    does with the probability (L + 4096) * 383 / size.
    """
    size = path.stat().st_size
    if size <= BLOCK * BLOCKS:
        return sha256_of(path)
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        for i in range(BLOCKS):
            stream.seek(i * (size - BLOCK) // (BLOCKS - 1))
            digest.update(stream.read(BLOCK))
    return digest.hexdigest()


def fault(file: Path, record: FileRecord, check: str) -> str:
    """Return how a file differs from its record; empty if it does not.

    Args:
        file: where it should be.
        record: what the manifest says of it.
        check: SIZE, FAST (with `sampled_sha256`) or FULL (with the SHA-256).

    Raises:
        ManifestError: the file cannot be read.
    """
    try:
        if not file.is_file():
            return f"is missing, the manifest says {record.size_bytes} bytes"
        if (found := file.stat().st_size) != record.size_bytes:
            return f"has {found} bytes, the manifest says {record.size_bytes}"
        if check == FULL and sha256_of(file) != record.sha256:
            return "has other contents than the manifest says (SHA-256)"
        if check == FAST and sampled_sha256(file) != (record.sample or record.sha256):
            return "has other contents than the manifest says (SHA-256 of a sample)"
    except OSError as error:
        raise ManifestError(f"{file} cannot be read: {error.strerror}") from error
    return ""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
