"""Size-limited JSON for untrusted files.

Python's objects take up to 27 times the memory of the text that they are read from.
"""

import json
import reprlib
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.files.untrusted_file import AdapterFile

MAX_BYTES = 1 << 20

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring = 4, 20, 20, 200


def read_json(path: Path, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        AdapterError: the file cannot be read, has more than `limit` bytes, or holds no object.
    """
    file = AdapterFile(path)
    if file.size > limit:
        raise AdapterError(f"{path} has {file.size} bytes; expected at most {limit}")
    data = file.read(0, file.size).tobytes()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise AdapterError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def shown(value: object) -> str:
    """Return a value of a file for a message, shortened where it is long."""
    return _SHORT.repr(value)
