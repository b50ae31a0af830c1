"""Read a PEFT LoRA directory: transpose by key, fold each module's scale into B."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trt_lora.plugins.contract import BindingNames
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.peft_config import PeftConfig, read_peft_config
from trt_lora.runtime.safetensors_file import check_finite, read_safetensors
from trt_lora.runtime.tensors import Array, Tensor, tensor_from_storage, widen

WEIGHTS_FILE = "adapter_model.safetensors"

# PEFT names a tensor by the module's path in the wrapped model.
_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<factor>[AB])\.weight")


def adapter_from_peft(directory: Path) -> Adapter:
    """Read a PEFT LoRA directory; bindings are named `lora_A_<path>` and `lora_B_<path>`.

    PEFT stores A as [r, k] and B as [n, r]; both are transposed, by their key. The scale of each
    module is folded into B in float32, before any cast.

    Raises:
        AdapterError: config or weights are missing, damaged, refused, or contradict each other.
    """
    config = read_peft_config(directory)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        others = ", ".join(sorted(p.name for p in directory.glob("adapter_model*"))) or "none"
        raise AdapterError(
            f"{directory} has no {WEIGHTS_FILE} (other weight files: {others}); "
            "save the adapter again with safe_serialization=True"
        )
    tensors = dict(_canonical(path, config))
    if not tensors:
        raise AdapterError(f"{path} holds no tensors; save the adapter again")
    return Adapter(str(directory), tensors, config.base_model)


def _canonical(path: Path, config: PeftConfig) -> Iterator[tuple[str, Tensor]]:
    for key, storage, dtype in read_safetensors(path):
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(
                f"{path}: tensor {key!r} is not a LoRA factor of a linear layer "
                "(base_model.model.<module>.lora_A.weight or .lora_B.weight); "
                "an engine has no input for it"
            )
        what = f"{path}: tensor {key!r}"
        check_finite(storage, dtype, what)
        site, is_a = match["path"], match["factor"] == "A"
        _check_rank(storage, is_a, config.rank(site), what)
        if is_a:
            tensor = tensor_from_storage(np.ascontiguousarray(storage.T), dtype)
            yield BindingNames.LORA.binding("A", site), tensor
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                values = widen(storage, dtype).astype(np.float32) * np.float32(config.scale(site))
            if not np.isfinite(values).all():
                raise AdapterError(
                    f"{what} times its scale {config.scale(site):.4g} leaves float32"
                )
            tensor = tensor_from_storage(np.ascontiguousarray(values.T), "float32")
            yield BindingNames.LORA.binding("B", site), tensor


def _check_rank(storage: Array, is_a: bool, rank: int, what: str) -> None:
    """A [r, k] and B [n, r], as PEFT stores them, must have the rank that the config says."""
    if storage.ndim != 2:
        raise AdapterError(f"{what} has shape {storage.shape}, expected a matrix")
    found = storage.shape[0 if is_a else 1]
    if found != rank:
        raise AdapterError(
            f"{what} has shape {storage.shape}, rank {found}, but the config says rank {rank}"
        )
