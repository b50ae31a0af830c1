"""Optional dependencies: imported lazily, with the pip command for a missing one; versions."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

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


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of the packages that are installed."""
    import importlib.metadata  # takes 25 ms

    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
