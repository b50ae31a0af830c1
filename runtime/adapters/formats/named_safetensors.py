"""Safetensors files keyed by binding name: A [k, r], B [r, n], the scale folded into B."""

from collections.abc import Mapping
from pathlib import Path

import safetensors

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.safetensors_file import read_safetensors
from trt_lora.runtime.memory.tensor import Tensor

FINGERPRINT_KEY = "trt_lora.base_fingerprint"  # in the metadata of files that this package writes


def adapter_from_safetensors(path: Path) -> Adapter:
    """Read such a file; both spellings of the names are known, and an engine's own names.

    Raises:
        AdapterError: the file is missing or damaged.
    """
    file = read_safetensors(path)
    if not file.tensors:
        raise AdapterError(f"{path} holds no tensors; save the adapter again")
    weights = {t.name: Weight((t.name,), t.shape, t.dtype, t.read) for t in file.tensors}
    return Adapter(str(path), weights, base_fingerprint=file.metadata.get(FINGERPRINT_KEY))


def save_safetensors(
    tensors: Mapping[str, Tensor], path: Path, fingerprint: str | None = None
) -> None:
    """Write tensors in host memory, and the fingerprint of the base model where it is known.

    Raises:
        OSError: the file cannot be written, such as where the disk is full.
    """
    entries = {
        name: safetensors.TensorSpec(
            dtype=tensor.dtype,
            shape=tensor.shape,
            data_ptr=tensor.pointer,
            data_len=tensor.nbytes,
        )
        for name, tensor in tensors.items()
    }
    metadata = {"format": "pt"} | ({FINGERPRINT_KEY: fingerprint} if fingerprint else {})
    path.touch()
    mode = path.stat().st_mode
    try:
        safetensors.serialize_file(entries, path, metadata)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from error
    path.chmod(mode)  # the library's files are for their owner alone, whatever the umask says
