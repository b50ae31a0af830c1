"""Type-checked, size-limited JSON for untrusted files.

Python's objects take up to 27 times the memory of the text that they are read from.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import EnumType
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.files.untrusted_file import AdapterFile

MAX_BYTES = 1 << 20

_hints = cache(typing.get_type_hints)

HeldT = TypeVar("HeldT", dict[str, Any], list[Any])


def read_json(path: Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        AdapterError: the file cannot be read, has more than `limit` bytes, or holds no object.
    """
    return _holding(dict, "an object", path, limit)


def read_json_list(path: Path, limit: int = MAX_BYTES) -> list[Any]:
    """Return the list in a JSON file.

    Raises:
        AdapterError: the file cannot be read, has more than `limit` bytes, or holds no list.
    """
    return _holding(list, "a list", path, limit)


def _holding(kind: type[HeldT], what: str, path: Path, limit: int) -> HeldT:
    file = AdapterFile(path)
    if file.size > limit:
        raise AdapterError(f"{path} has {file.size} bytes; expected at most {limit}")
    data = file.read(0, file.size).tobytes()
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise AdapterError(f"{path} holds a {type(value).__name__}, not {what}")
    return value


class UnknownFieldError(ValueError):
    """An object has a field that its dataclass does not know."""


def typed(hint: Any, value: object, where: str) -> Any:
    """Return a value of JSON as a type annotation has it, and all that it holds.

    Args:
        hint: of a scalar, a union of such or an enum of texts; of a dataclass or `Mapping[str, X]`,
            made of an object, or of `tuple[X, ...]`, made of a list.
        value: what was read.
        where: what messages call it.

    Raises:
        UnknownFieldError: an object has a field that its dataclass lacks.
        ValueError: it has another type, or lacks a field; the message names the place.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _filled(hint, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(typed(arguments[0], item, where) for item in value)
    if origin is Mapping and isinstance(value, dict):
        return {n: typed(arguments[1], v, f"{where}[{shown(n)}]") for n, v in value.items()}
    if isinstance(hint, EnumType) and value in [*hint]:
        return hint(value)
    kinds = arguments if origin is types.UnionType else (hint,)
    kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        expected = " or ".join(map(_described, kinds))
        raise ValueError(f"{where} is {shown(value)}, expected {expected}")
    return value


def _described(kind: Any) -> str:
    if isinstance(kind, EnumType):
        return f"one of {', '.join(kind)}"
    is_object = kind is Mapping or dataclasses.is_dataclass(kind)
    return "an object" if is_object else "a list" if kind is tuple else str(kind.__name__)


def _filled(kind: Any, fields: Mapping[str, Any], where: str) -> Any:
    hints, known = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    for name, field in known.items():
        if name not in fields and field.default is field.default_factory:  # there is neither
            raise ValueError(f"{name} is missing")
    if unknown := [name for name in fields if name not in known]:
        raise UnknownFieldError(f"{shown(unknown[0])} is not known to this release")
    return kind(**{n: typed(hints[n], value, f"{where}.{n}") for n, value in fields.items()})
