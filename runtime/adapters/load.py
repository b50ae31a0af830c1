"""Load an adapter from disk; detects its format."""

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.formats.diffusion.reader import adapter_of_diffusion, is_of_diffusion
from trt_lora.runtime.adapters.formats.edgellm import PROCESSED_FILE, adapter_from_safetensors
from trt_lora.runtime.adapters.formats.onnx_adapter import adapter_from_onnxruntime
from trt_lora.runtime.adapters.formats.peft import INDEX_FILE, WEIGHTS_FILE, adapter_from_peft
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.runtime.adapters.formats.trtllm import TRTLLM_WEIGHTS, adapter_from_trtllm
from trt_lora.runtime.files.file_record import sampled_sha256
from trt_lora.runtime.files.safetensors_file import in_memory, read_safetensors
from trt_lora.runtime.files.untrusted_file import file_inside
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.interop import tensor_from

ADAPTER_FILES = (".safetensors", ".onnx_adapter")  # endings of files that are an adapter alone
_SUFFIXES = (".json", ".npy", *ADAPTER_FILES)
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
# One of these makes a directory an adapter. A .bin beside them is not looked at: that is how PEFT
# reads a directory with both, and many have both.
_WEIGHTS = (WEIGHTS_FILE, INDEX_FILE, PROCESSED_FILE, TRTLLM_WEIGHTS, DIFFUSERS_WEIGHTS)
_OF_MODELS = ("model.safetensors", "diffusion_pytorch_model.safetensors")  # of base models
_KINDS = (
    "a directory by PEFT, diffusers, TensorRT-LLM (model.lora_weights.npy) or TensorRT-Edge-LLM "
    "(processed_adapter_model.safetensors), a .safetensors file of binding names or of a diffusion "
    "model's LoRA, or an .onnx_adapter file"
)


@checked
def load_adapter(
    path: str | Path, manifest: Manifest | None = None, *, component: str = ""
) -> Adapter:
    """Open an adapter; its values are read when they are needed.

    Args:
        path: a directory by PEFT, diffusers, TensorRT-LLM or TensorRT-Edge-LLM, a `.safetensors`
            file whose tensor names are binding names, or those that diffusers, ComfyUI, kohya's
            scripts, LyCORIS and others give, or an `.onnx_adapter` file.
        manifest: of the engine; needed for TensorRT-LLM's format, which holds no shapes, and for
            diffusion models, whose modules have a name in every tool.
        component: of a diffusion pipeline that the engine is, such as `unet`, of a file for
            several; by default what the manifest says, or whose prefix matches.

    Raises:
        AdapterError: it is none of these, is damaged, or asks for what is not supported.
        ConfigError: there is no such component.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors" and not path.is_dir():  # opened once: of one version
            return _from_safetensors(path, manifest, component)
        return _of_one_version(path, manifest, component)
    except OSError as error:  # a name that is too long, a directory that may not be read
        raise AdapterError(f"{path} cannot be opened: {error.strerror}") from error


@checked
def adapter_of_tensors(source: str, tensors: Mapping[str, object], manifest: Manifest) -> Adapter:
    """Return a diffusion model's adapter that another program has in memory.

    Args:
        source: where it is from, for messages.
        tensors: by the names that `load_adapter` knows in a file of a diffusion model; each what
            `tensor_from` takes.
        manifest: of the engine; modules of other components than it says are ignored.

    Raises:
        AdapterError: as `load_adapter`.
        TensorError: a value is no tensor.
    """
    file = in_memory({name: tensor_from(tensor) for name, tensor in tensors.items()})
    return adapter_of_diffusion(Path(source), file, manifest)


def looks_like_adapter(path: Path) -> bool:
    """Return whether a directory has the weights of an adapter, or a file has an ending of theirs.

    Nothing is read: a `.safetensors` file may hold anything.
    """
    if path.is_dir():
        return any((path / name).exists() for name in (*_WEIGHTS, CONFIG_FILE))
    return path.suffix in ADAPTER_FILES


def _from_safetensors(path: Path, manifest: Manifest | None, component: str) -> Adapter:
    file = read_safetensors(path)
    if is_of_diffusion(file, manifest):
        return adapter_of_diffusion(path, file, manifest, component)
    return adapter_from_safetensors(path, file)


def _of_one_version(path: Path, manifest: Manifest | None, component: str) -> Adapter:
    """Load, and see that no file was exchanged between opening the first and opening the last."""
    for _ in range(2):  # once more, for a version that was put in place meanwhile
        # A link that leads elsewhere and back again between two files would mix their directories.
        target = Path(os.path.realpath(path)) if path.is_dir() else path
        before = file_versions(target)
        try:
            adapter = _load(target, manifest, component)
        except AdapterError:
            if file_versions(target) == before:
                raise
        else:
            if file_versions(target) == before:
                return adapter
    raise AdapterError(f"{path} was replaced or changed while it was read; load it again")


def files_fingerprint(path: Path) -> str:
    """Return a SHA-256 of an adapter's files: their names, sizes and `sampled_sha256`.

    Raises:
        AdapterError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for file in sorted(_files(path)):
            digest.update(f"{file.name}\0{file.stat().st_size}\0{sampled_sha256(file)}\0".encode())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    """The files that may be an adapter's."""
    files = path.iterdir() if path.is_dir() else [path]
    return [file for file in files if file.suffix in _SUFFIXES]


def file_versions(path: Path) -> dict[str, tuple[int, ...]]:
    """Return inode, size and times (mtime, ctime; ns) of an adapter's files, by their names.

    Raises:
        OSError: the directory cannot be read.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in _files(path):
        with contextlib.suppress(OSError, ValueError):  # it has gone, or never was there
            s = file.stat()
            found[file.name] = (s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
    return found


def _load(path: Path, manifest: Manifest | None, component: str) -> Adapter:
    if path.is_dir():
        return _from_directory(path, manifest, component)
    if path.suffix == ".onnx_adapter":
        return adapter_from_onnxruntime(path)
    if not path.exists():
        raise AdapterError(f"{path} does not exist; expected {_KINDS}")
    convert = f"; convert it with: trt-lora convert-adapter {path} OUT --format peft"
    hint = convert if path.suffix == ".bin" else ""
    raise AdapterError(f"{path} is not an adapter; expected {_KINDS}{hint}")


def _from_directory(path: Path, manifest: Manifest | None, component: str) -> Adapter:
    found = [name for name in _WEIGHTS if (path / name).exists()]
    if len(found) > 1:
        raise AdapterError(
            f"{path} holds {' and '.join(found)}: which of them is the adapter cannot be told; "
            "move all but one, and what belongs to them, to another directory"
        )
    if found == [PROCESSED_FILE]:
        file = file_inside(path, PROCESSED_FILE)
        return adapter_from_safetensors(file, read_safetensors(file))
    if found == [TRTLLM_WEIGHTS]:
        return adapter_from_trtllm(path, manifest)
    if name := _file_alone(path, found):
        return _from_safetensors(file_inside(path, name), manifest, component)
    return adapter_from_peft(path)


def _file_alone(path: Path, found: list[str]) -> str:
    """The one `.safetensors` file of a directory, unless its name is of another format."""
    if found == [DIFFUSERS_WEIGHTS]:
        return DIFFUSERS_WEIGHTS
    names = [file.name for file in _files(path) if file.suffix == ".safetensors"]
    is_alone = len(names) == 1 and not found and not (path / CONFIG_FILE).exists()
    return names[0] if is_alone and names[0] not in _OF_MODELS else ""
