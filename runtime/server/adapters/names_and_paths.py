"""Names of adapters that others choose, and paths that others give: what is taken of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.store.names import check_name

_LONGEST_NAME = 256  # bytes
_NOT_IN_NAMES = frozenset("\\,")  # a router splits lists of names at commas


def check_served_name(name: str, base: Sequence[str]) -> None:
    """Refuse what cannot be the name of an adapter, or is the base model's.

    Raises:
        HttpError: 400.
    """
    if name in base:
        raise HttpError(
            400,
            f"The lora adapter '{name}' conflicts with a served base model.",
            kind="InvalidUserInput",
        )
    is_odd = any(c in _NOT_IN_NAMES or not c.isprintable() for c in name)
    if is_odd or ".." in name or len(name.encode(errors="replace")) > _LONGEST_NAME:
        raise HttpError(
            400,
            "lora_name has characters that a name cannot have (backslash, comma, "
            f"control characters, ..), or more than {_LONGEST_NAME} bytes",
            "lora_name",
        )
    try:
        check_name(name)
    except AdapterError as error:
        raise HttpError(400, str(error), "lora_name") from error


def path_inside(path: str | Path, roots: Iterable[Path]) -> Path | None:
    """Return a path with its links resolved; None if it leads nowhere, or out of all roots.

    Args:
        path: of anything.
        roots: folders, their own links resolved.
    """
    try:
        found = Path(path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        return None
    return found if any(found.is_relative_to(root) for root in roots) else None
