"""Load an adapter from disk, whatever its format."""

from pathlib import Path

import numpy as np

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.peft_format import adapter_from_peft
from trt_lora.runtime.safetensors_file import check_finite, read_safetensors
from trt_lora.runtime.tensors import tensor_from_storage


def load_adapter(path: str | Path) -> Adapter:
    """Read an adapter from a PEFT directory or a `.safetensors` file.

    Raises:
        AdapterError: it is neither, is damaged, or asks for what is not supported.
    """
    path = Path(path)
    if path.is_dir():
        return adapter_from_peft(path)
    if path.suffix == ".safetensors":
        return adapter_from_safetensors(path)
    problem = "is neither" if path.exists() else "does not exist; expected"
    raise AdapterError(f"{path} {problem} a PEFT adapter directory or a .safetensors file")


def adapter_from_safetensors(path: Path) -> Adapter:
    """Read a file whose tensor names are binding names, A [k, r] and B [r, n], scale in B.

    Raises:
        AdapterError: the file is missing or damaged, or a value is not finite.
    """
    tensors = {}
    for name, storage, dtype in read_safetensors(path):
        check_finite(storage, dtype, f"{path}: tensor {name!r}")
        # A copy: the file may be replaced while the adapter is in use.
        tensors[name] = tensor_from_storage(np.array(storage), dtype)
    if not tensors:
        raise AdapterError(f"{path} holds no tensors; save the adapter again")
    return Adapter(str(path), tensors)
