"""Minimum version of polygraphy."""

from trt_lora.plugins.errors import BackendError

MINIMUM = (0, 53, 6)  # saves the result of a comparison; an older one only prints it


def check_polygraphy_version(version: str, purpose: str) -> None:
    """Check that polygraphy is new enough.

    Args:
        version: of the installed one.
        purpose: what needs it.

    Raises:
        BackendError: it is too old.
    """
    if tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < MINIMUM:
        raise BackendError(
            f"polygraphy is {version}, {purpose} needs {'.'.join(map(str, MINIMUM))} or later; "
            "pip install 'trt-lora[polygraphy]'"
        )
