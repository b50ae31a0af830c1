"""Files that appear whole or not at all."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def publish_directory(directory: Path) -> Iterator[Path]:
    """Yield a scratch directory that becomes `directory` when the block ends well.

    The scratch directory lies beside the target, so that the last step is one rename on one file
    system; it is removed when the block raises, Ctrl-C included. An existing `directory` is
    replaced, and put back if the replacement fails.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        work = scratch / directory.name
        work.mkdir()
        yield work
        _replace(directory, work, retired=scratch / "retired")
    except OSError as error:
        if error.errno == errno.ENOSPC:  # whoever wrote knows the scratch directory, if any
            error.filename = str(directory)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def publish_file(path: Path) -> Iterator[Path]:
    """Yield the path of a scratch file that becomes `path` when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        work = Path(scratch) / path.name
        yield work
        os.replace(work, path)


def _replace(directory: Path, work: Path, *, retired: Path) -> None:
    if not directory.exists():
        os.replace(work, directory)
        return
    os.replace(directory, retired)
    try:
        os.replace(work, directory)
    except BaseException:
        os.replace(retired, directory)
        raise
