"""Read a safetensors file through a memory map, bfloat16 included.

The safetensors library checks header and offsets; its numpy face cannot return bfloat16, so the
elements are viewed in the map at the offsets it has checked. Format: 8 bytes little-endian header
length, JSON header, data (https://huggingface.co/docs/safetensors).
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import safetensors

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.tensors import Array, storage_dtype, widen

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_safetensors(path: Path) -> Iterator[tuple[str, Array, str]]:
    """Yield (name, storage, dtype) of every tensor; the storage lies in a read-only memory map.

    Raises:
        AdapterError: the file is missing, damaged, or has a dtype that LoRA weights do not have.
    """
    if not path.is_file():
        raise AdapterError(f"{path} does not exist or is not a file")
    try:
        with safetensors.safe_open(path, framework="np"):
            pass  # opening checks the header and that the offsets lie in the file
    except (safetensors.SafetensorError, OSError) as error:
        raise AdapterError(
            f"{path} is not a valid safetensors file ({error}); copy or save the adapter again"
        ) from error
    data = np.memmap(path, np.uint8, mode="r")
    (header_size,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + header_size].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise AdapterError(
                f"{path}: tensor {name!r} is {entry['dtype']}; "
                f"LoRA weights are one of {', '.join(_DTYPES)}"
            )
        start, stop = (8 + header_size + offset for offset in entry["data_offsets"])
        yield name, data[start:stop].view(storage_dtype(dtype)).reshape(entry["shape"]), dtype


def check_finite(storage: Array, dtype: str, what: str) -> None:
    """Raise AdapterError, naming `what`, if a value is NaN or infinite."""
    if not np.isfinite(widen(storage, dtype)).all():
        raise AdapterError(
            f"{what} holds NaN or infinity: the training diverged or the file is damaged"
        )
