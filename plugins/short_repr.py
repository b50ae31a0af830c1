"""Reprs of one line, below 200 characters, for objects that hold whole models."""

import dataclasses
import reprlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

_LONGEST, _ITEMS = 199, 3
_VALUE = reprlib.Repr()
_VALUE.maxlevel, _VALUE.maxstring, _VALUE.maxother, _VALUE.maxlong = 2, 60, 60, 40

ClassT = TypeVar("ClassT")


def short_repr(cls: type[ClassT]) -> type[ClassT]:
    """Give a dataclass a repr of the fields that are not their defaults, each shortened."""
    type.__setattr__(cls, "__repr__", _repr)
    return cls


def clipped(text: str) -> str:
    """Return the beginning of a repr, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def short_value(value: object) -> str:
    """Return the repr of a value; of an array its shape, of many items how many there are."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"<{getattr(value, 'dtype', '')} {list(shape)}>"
    if isinstance(value, Mapping | AbstractSet | tuple | list) and len(value) > _ITEMS:
        return f"<{len(value)} items>"
    return _VALUE.repr(value)


def _repr(instance: Any) -> str:
    values = ((field, getattr(instance, field.name)) for field in dataclasses.fields(instance))
    told = (f"{field.name}={short_value(value)}" for field, value in values if _tells(field, value))
    return clipped(f"{type(instance).__name__}({', '.join(told)})")


def _tells(field: "dataclasses.Field[Any]", value: object) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return field.repr and not (type(value) is type(default) and value == default)
