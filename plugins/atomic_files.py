"""Atomic writes of files and directories: scratch copy, then one rename."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.scratch import RETIRED, scratch_directory

# How a rename of a directory fails where something stands; an empty directory alone gives way.
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@contextmanager
def publish_directory(
    directory: Path, may_replace: Callable[[Path], bool] = lambda _: True
) -> Iterator[Path]:
    """Yield a scratch directory that becomes `directory` when the block ends well.

    The scratch directory lies beside the target, so that the last step is one rename on one file
    system; it is removed when the block raises, Ctrl-C included. What stands at `directory` in the
    end is replaced, and put back if the replacement fails.

    Args:
        directory: what to make.
        may_replace: whether what stands there in the end may go.

    Raises:
        ConfigError: it may not; the message says where the result is instead.
    """
    with scratch_directory(directory) as scratch:
        work = scratch / directory.name
        work.mkdir()
        try:
            with _no_file():
                yield work
        except OSError as error:
            if error.errno == errno.ENOSPC:  # whoever wrote knows the scratch directory, if any
                error.filename = str(directory)
            raise
        if not (_rename(work, directory) or _replace(directory, work, scratch, may_replace)):
            raise ConfigError(
                f"{directory} appeared in the meantime and stays as it is; the finished directory "
                f"is {_keep(work, directory)}: move it to where it should be"
            )


@contextmanager
def publish_file(path: Path) -> Iterator[Path]:
    """Yield the path of a scratch file that becomes `path` when the block ends well."""
    with scratch_directory(path) as scratch:
        work = scratch / path.name
        with _no_file():
            yield work
        os.replace(work, path)


@contextmanager
def _no_file() -> Iterator[None]:
    """Let whoever reports an interrupt of the block say what became of the file."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.add_note("no file was written")
        raise


def _rename(work: Path, directory: Path) -> bool:
    """Rename a directory unless its target exists; return whether it was renamed."""
    if os.path.lexists(directory):
        return False
    try:
        os.rename(work, directory)
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
        return False
    return True


def _replace(
    directory: Path, work: Path, scratch: Path, may_replace: Callable[[Path], bool]
) -> bool:
    if not may_replace(directory):
        return False
    os.replace(directory, scratch / RETIRED)
    try:
        os.replace(work, directory)
    except BaseException:
        os.replace(scratch / RETIRED, directory)
        raise
    return True


def _keep(work: Path, directory: Path) -> Path:
    """Rename a directory that cannot be `directory` to the first name beside it that is free."""
    names = (directory.with_name(f"{directory.name}-{count}") for count in itertools.count(2))
    return next(place for place in names if _rename(work, place))
