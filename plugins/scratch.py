"""Scratch directories next to their target; removes those left by killed processes."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

RETIRED = "trt-lora.retired"  # in a scratch directory: what stood where its result goes
_MARKER = "trt-lora.lock"  # in every scratch directory of ours; locked as long as its process lives


@contextmanager
def scratch_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory on the file system of `target`, and remove it in the end.

    A killed process leaves its own behind, weights and all; the next to come here removes it. An
    OSError names the target, which its reader knows, and not the scratch directory.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target.parent)
    # The name is known before the directory is there: nothing interrupts between the two.
    scratch = target.parent / f".{target.name}.{secrets.token_hex(8)}"
    try:
        scratch.mkdir(mode=0o700)
        with (scratch / "trt-lora.new").open("xb") as file:
            if _lock(file):  # never to be seen without the lock
                os.rename(file.name, scratch / _MARKER)
            yield scratch
    except OSError as error:
        if error.filename is not None:  # where none is, even None would replace the message
            error.filename = _target_of(error.filename, scratch, target)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _target_of(name: object, scratch: Path, target: Path) -> object:
    """Return the path that a path in a scratch directory stands for, and any other as it is."""
    if not isinstance(name, str | Path) or not Path(name).is_relative_to(scratch):
        return name
    inside = Path(name).relative_to(scratch)
    return str(target.parent / inside if inside.parts else target)


def _remove_abandoned(folder: Path) -> None:
    for marker in folder.glob(f".*.*/{_MARKER}"):
        if marker.is_symlink() or marker.parent.is_symlink() or not marker.is_file():
            continue
        try:
            with marker.open("r+b") as file:  # NFS locks only what is open for writing
                if _lock(file):
                    _remove(marker.parent)
        except OSError:  # another process was faster, or it is another user's
            continue


def _remove(scratch: Path) -> None:
    """Remove a scratch directory; put back what a process killed between two renames retired."""
    target = scratch.with_name(scratch.name[1:].rpartition(".")[0])
    if (scratch / RETIRED).exists() and not os.path.lexists(target):
        os.rename(scratch / RETIRED, target)
    shutil.rmtree(scratch, ignore_errors=True)


def _lock(file: IO[bytes]) -> bool:
    """Lock a file for the life of this process; False if taken, or without lock support."""
    try:
        import fcntl  # not on Windows

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
