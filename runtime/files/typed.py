"""Type check of data from a file against the annotations of a dataclass."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any

from trt_lora.runtime.files.json_file import shown


def check_types(value: object, hint: Any, where: str) -> None:
    """Check a value and all it holds; knows dataclasses, unions, `tuple[X, ...]` and mappings.

    Args:
        value: what was read.
        hint: its type annotation.
        where: what messages call it.

    Raises:
        TypeError: it has another type; the message names the place.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        for name, kind in typing.get_type_hints(hint).items():
            check_types(getattr(value, name), kind, f"{where}.{name}")
    elif origin is types.UnionType:
        if type(value) not in arguments:
            raise TypeError(f"{where} is {shown(value)}")
    elif origin is tuple and isinstance(value, tuple):
        for item in value:
            check_types(item, arguments[0], where)
    elif origin is Mapping and isinstance(value, dict):
        for key, item in value.items():
            check_types(item, arguments[1], f"{where}[{shown(key)}]")
    elif type(value) is not (origin or hint) and not _is_enum(value, hint):
        raise TypeError(f"{where} is {shown(value)}, expected {getattr(hint, '__name__', hint)}")


def _is_enum(value: object, hint: Any) -> bool:
    return isinstance(value, Enum) and isinstance(value, hint)
