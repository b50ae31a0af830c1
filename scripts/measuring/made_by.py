"""Files that a command of ours writes, when they are read again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trt_lora.plugins.errors import ConfigError


@contextmanager
def made_by(command: str, path: Path) -> Iterator[None]:
    """Refuse a file whose contents the block cannot take, and name the command that writes such.

    Raises:
        ConfigError: an item is missing, or of another type.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error!s:.500}"
        raise ConfigError(
            f"{path} is not what `{command}` writes: {what}; run it again, and pass its output"
        ) from error
