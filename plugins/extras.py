"""Lazy imports of optional dependencies, with the pip command for a missing one."""

from collections.abc import Iterator
from contextlib import contextmanager

from trt_lora.plugins.errors import BackendError


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Import libraries of an extra inside the block.

    Args:
        name: of the extra, such as `export`.
        purpose: what they are imported for, such as a command.

    Raises:
        BackendError: one of them cannot be imported; the message says what to install.
    """
    try:
        yield
    except ImportError as error:
        raise BackendError(
            f"{purpose} needs what is not installed ({error}); pip install 'trt-lora[{name}]'"
        ) from error
