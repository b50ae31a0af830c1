"""Load an adapter from disk, whatever its format."""

import contextlib
from pathlib import Path

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapter import Adapter
from trt_lora.runtime.edgellm_format import PROCESSED_FILE, adapter_from_edgellm
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.named_format import adapter_from_safetensors
from trt_lora.runtime.onnxruntime_format import adapter_from_onnxruntime
from trt_lora.runtime.peft_format import adapter_from_peft
from trt_lora.runtime.trtllm_format import TRTLLM_WEIGHTS, adapter_from_trtllm

_SUFFIXES = (".json", ".safetensors", ".npy", ".onnx_adapter")
_KINDS = (
    "a directory by PEFT, TensorRT-LLM (model.lora_weights.npy) or TensorRT-Edge-LLM "
    "(processed_adapter_model.safetensors), a .safetensors file of binding names, or an "
    ".onnx_adapter file"
)


def load_adapter(path: str | Path, manifest: Manifest | None = None) -> Adapter:
    """Open an adapter; its values are read when they are needed.

    Args:
        path: a directory by PEFT, TensorRT-LLM or TensorRT-Edge-LLM, a `.safetensors` file whose
            tensor names are binding names, or an `.onnx_adapter` file.
        manifest: of the engine; needed for TensorRT-LLM's format, which holds no shapes.

    Raises:
        AdapterError: it is none of these, is damaged, or asks for what is not supported.
    """
    path = Path(path)
    if path.suffix == ".safetensors" and not path.is_dir():  # opened once, and so of one version
        return adapter_from_safetensors(path)
    for _ in range(2):  # once more, for a version that was put in place meanwhile
        before = _versions(path)
        try:
            adapter = _load(path, manifest)
        except AdapterError:
            if _versions(path) == before:
                raise
        else:
            if _versions(path) == before:
                return adapter
    raise AdapterError(f"{path} was replaced or changed while it was read; load it again")


def _versions(path: Path) -> dict[str, tuple[int, ...]]:
    """What tells one version of each of an adapter's files from another."""
    found: dict[str, tuple[int, ...]] = {}
    for file in path.iterdir() if path.is_dir() else [path]:
        if file.suffix in _SUFFIXES:
            with contextlib.suppress(OSError):  # it has gone, or never was there
                s = file.stat()
                found[file.name] = (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
    return found


def _load(path: Path, manifest: Manifest | None) -> Adapter:
    if path.is_dir():
        return _from_directory(path, manifest)
    if path.suffix == ".onnx_adapter":
        return adapter_from_onnxruntime(path)
    if not path.exists():
        raise AdapterError(f"{path} does not exist; expected {_KINDS}")
    convert = f"; convert it with: trt-lora convert-adapter {path} OUT --format peft"
    hint = convert if path.suffix == ".bin" else ""
    raise AdapterError(f"{path} is not an adapter; expected {_KINDS}{hint}")


def _from_directory(path: Path, manifest: Manifest | None) -> Adapter:
    if (path / PROCESSED_FILE).exists():
        return adapter_from_edgellm(path)
    if (path / TRTLLM_WEIGHTS).exists():
        return adapter_from_trtllm(path, manifest)
    return adapter_from_peft(path)
