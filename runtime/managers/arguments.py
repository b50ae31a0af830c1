"""Validation of adapter names and scales."""

import math
from numbers import Real

from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown

_LONGEST = 1024  # characters of a name


def check_string(value: object, label: str) -> None:
    """Refuse a name that is no string.

    Raises:
        AdapterError: it is none.
    """
    if not isinstance(value, str):
        raise AdapterError(f"{label} is a string, got {_described(value)}")


def check_new_name(name: str) -> None:
    """Refuse what cannot be the name of an adapter.

    Raises:
        AdapterError: it is empty, too long, or no text that can be written.
    """
    if not name:
        raise AdapterError("an adapter needs a name; the empty one means the base model")
    if len(name) > _LONGEST:
        raise AdapterError(
            f"the name of an adapter has at most {_LONGEST} characters, got {len(name)}: "
            f"{shown(name)}"
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise AdapterError(
            f"the name of an adapter is Unicode text, got {shown(name)}: {error.reason}"
        ) from error


def checked_scale(scale: object, label: str) -> float:
    """Return a strength, or the weight of a blend's part, as a float.

    Raises:
        AdapterError: it is no number, or not finite.
    """
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise AdapterError(f"{label}: a scale is a number, got {_described(scale)}")
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise AdapterError(f"{label}: a scale is {value}, expected a finite number")
    return value


def _described(value: object) -> str:
    return f"{shown(value)} ({type(value).__name__})"
