"""Type-checked, size-limited JSON for untrusted files.

Python's objects take up to 27 times the memory of the text that they are read from.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.files.untrusted_file import AdapterFile

MAX_BYTES = 1 << 20

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
