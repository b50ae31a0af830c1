"""Size-limited JSON for untrusted files.

Python's objects take up to 27 times the memory of the text that they are read from.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.files.untrusted_file import AdapterFile

MAX_BYTES = 1 << 20

HeldT = TypeVar("HeldT", dict[str, Any], list[Any])


def read_json(path: Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        AdapterError: the file cannot be read, has more than `limit` bytes, or holds no object.
    """
    return read_json_as(dict, path, limit)


def read_json_as(kind: type[HeldT], path: Path, limit: int) -> HeldT:
    """Return the object, or the list, in a JSON file.

    Raises:
        AdapterError: as `read_json`.
    """
    file = AdapterFile(path)
    if file.size > limit:
        raise AdapterError(f"{path} has {file.size} bytes; expected at most {limit}")
    data = file.read(0, file.size).tobytes()
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, kind):
        what = "an object" if kind is dict else "a list"
        raise AdapterError(f"{path} holds a {type(value).__name__}, not {what}")
    return value
