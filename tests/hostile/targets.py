"""Hostile bytes where an adapter or an engine keeps them: taken whole, or refused by name.

One function per kind of file, for the property tests and the fuzzer (`fuzz.py`) beside it: writes
the bytes, the other files being valid, loads them as a user does, and raises AssertionError for
another exception than ours, a message without the path, or a manager that is not as before.
"""

import dataclasses
import json
import os
import tempfile
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from support.adapters.manager_setup import MANIFEST, SITE, manager_with, pair, refreshed, state_of
from support.fakes.fake_engine import FakeExecutor, make_manifest

from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.adapters.formats.diffusion.alphas import METADATA
from trt_lora.runtime.adapters.formats.edgellm import PROCESSED_FILE
from trt_lora.runtime.adapters.formats.onnx_adapter import save_onnxruntime
from trt_lora.runtime.adapters.formats.peft import INDEX_FILE, WEIGHTS_FILE
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.runtime.adapters.formats.trtllm import TRTLLM_CONFIG, TRTLLM_WEIGHTS
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.files.file_record import file_record
from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.manifest import MANIFEST_FILE, Manifest, read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

Target = Callable[[Path, bytes], None]

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
SHARD = "adapter_model-00001-of-00001.safetensors"
PLAN = b"not really a plan"
_KEY = f"base_model.model.{SITE}.lora_"

# --------------------------------------------------------------------------------------- the kinds


def safetensors(directory: Path, data: bytes) -> None:
    """A file of binding names, TensorRT-Edge-LLM's file, and the weights of a PEFT directory."""
    load(write(directory, {"adapter.safetensors": data}) / "adapter.safetensors")
    load(write(directory / "edgellm", {PROCESSED_FILE: data}))
    load(write(directory / "peft", {CONFIG_FILE: encoded(CONFIG), WEIGHTS_FILE: data}))


def diffusion(directory: Path, data: bytes) -> None:
    """A file of a diffusion model's names, and the metadata of one."""
    load(write(directory, {"adapter.safetensors": data}) / "adapter.safetensors")
    text = {METADATA: data.decode(errors="replace")}
    pair = {f"unet.{name.removeprefix('base_model.model.')}": t for name, t in peft_pair().items()}
    load(write(directory / "m", {"a.safetensors": save(pair, text)}) / "a.safetensors")


def peft(directory: Path, data: bytes) -> None:
    """The config of a PEFT directory, and its index of shards."""
    load(write(directory / "config", {CONFIG_FILE: data, WEIGHTS_FILE: peft_weights()}))
    files = {CONFIG_FILE: encoded(CONFIG), SHARD: peft_weights(), INDEX_FILE: data}
    load(write(directory / "index", files))


def npy(directory: Path, data: bytes) -> None:
    """The weights and the config of TensorRT-LLM's format."""
    weights, config = trtllm_arrays()
    load(write(directory / "weights", {TRTLLM_WEIGHTS: data, TRTLLM_CONFIG: npy_bytes(config)}))
    load(write(directory / "config", {TRTLLM_WEIGHTS: npy_bytes(weights), TRTLLM_CONFIG: data}))


def onnx_adapter(directory: Path, data: bytes) -> None:
    """ONNX Runtime's file."""
    load(write(directory, {"adapter.onnx_adapter": data}) / "adapter.onnx_adapter")


def manifest(directory: Path, data: bytes) -> None:
    """The manifest of an engine directory; what is accepted has the types that it declares."""
    write(directory, {MANIFEST_FILE: data, "engine.plan": PLAN})
    found = named(directory, lambda: read_manifest(directory))
    assert found is None or _is(found, Manifest), f"accepted with a wrong type: {found}"


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (safetensors, diffusion, peft, npy, onnx_adapter, manifest)
}


@cache
def seeds(kind: str) -> list[bytes]:
    """Valid files of a kind."""
    weights, config = trtllm_arrays()
    return {
        "safetensors": [peft_weights(), save(pair()), save(pair(), {"format": "pt"})],
        "diffusion": diffusion_files(),
        "peft": [encoded(CONFIG), encoded(full_config()), encoded(index_of(SHARD))],
        "npy": [npy_bytes(weights), npy_bytes(weights.astype(np.float16)), npy_bytes(config)],
        "onnx_adapter": [onnx_adapter_bytes()],
        "manifest": [encoded(manifest_fields())],
    }[kind]


# ------------------------------------------------------------------------------------- the promise


def load(path: Path) -> None:
    """Load into a bound manager, strictly and not, and into one that is bound afterwards."""
    for strict in (True, False):
        _load(manager_with(kept=pair()), path, state_of, strict=strict)
    late = manager_with(bound=False, kept=pair())
    _load(late, path, LoRAManager.get_binding_names)
    named(path, lambda: late.initialize_engine_bindings(FakeExecutor(MANIFEST)))


def _load(
    manager: LoRAManager, path: Path, state: Callable[[LoRAManager], object], *, strict: bool = True
) -> None:
    before = state(manager), manager.get_adapter_names()
    named(path, lambda: manager.load_weights("hostile", path, strict=strict))
    if manager.get_adapter_names() != ["kept", "hostile"]:
        assert before == (state(manager), manager.get_adapter_names()), "the manager has changed"
    elif state is state_of:
        manager.switch_weights("hostile")
        assert all(np.isfinite(tensor.numpy()).all() for tensor in refreshed(manager).values())


def named(path: Path, call: Callable[[], object]) -> object:
    """Return the result of a call, or None if it refuses by name."""
    try:
        return call()
    except LoRAError as error:
        message = str(error)
    except AssertionError:  # of whoever watches the clock
        raise
    except Exception as error:
        raise AssertionError(f"{error!r} is no exception of ours") from error
    assert str(path) in message, f"{message} does not name {path}"
    assert len(message) < 1 << 13, f"a message of {len(message)} characters"
    return None


def _is(value: object, hint: Any) -> bool:
    """Whether a value, and all it holds, has the types that its annotations say."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return isinstance(value, typing.cast(type, hint)) and all(
            _is(getattr(value, name), kind) for name, kind in hints.items()
        )
    if origin is types.UnionType:
        return any(_is(value, kind) for kind in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is(item, arguments[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, dict) and all(_is(item, arguments[1]) for item in value.values())
    return type(value) is hint


# ----------------------------------------------------------------------------------------- writing


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write files into a directory, dated back: a load waits where one was written just now."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
        os.utime(directory / name, (0, 0))
    return directory


def encoded(value: object) -> bytes:
    """JSON, lone surrogates and NaN included."""
    return json.dumps(value).encode()


@cache
def peft_weights() -> bytes:
    """One site of the engine, as PEFT stores it."""
    return save(peft_pair())


def peft_pair() -> dict[str, Array]:
    a, b = np.ones((2, 8), np.float32), np.ones((6, 2), np.float32)
    return {f"{_KEY}A.weight": a, f"{_KEY}B.weight": b}


def diffusion_files() -> list[bytes]:
    """One site of the engine by kohya, as LoHa, and as LoKr; beside it what has no effect."""
    stem, one = f"lora_unet_{SITE.replace('.', '_')}", np.ones((2, 2), np.float32)
    down, up, alpha = np.ones((2, 8), "f"), np.ones((6, 2), "f"), np.array(1, np.float16)
    loha = {f"hada_w{i}_{x}": w for i in (1, 2) for x, w in (("a", up), ("b", down))}
    kinds = (
        {"lora_down.weight": down, "lora_up.weight": up, "diff_b": np.zeros(6, "f")},
        loha,
        {"lokr_w1": one, "lokr_w2_a": up[:3], "lokr_w2_b": down[:, :4]},
    )
    files = [save({f"{stem}.{n}": t for n, t in (k | {"alpha": alpha}).items()}) for k in kinds]
    return [*files, encoded({"unet.peft_type": "LORA", "unet.r": 2, "unet.lora_alpha": 4})]


def full_config() -> dict[str, Any]:
    """Every field of a PEFT config that is looked at."""
    return CONFIG | {
        "use_rslora": True,
        "rank_pattern": {r"v_proj": 2, r"layers\.\d+\.q_proj": 4},
        "alpha_pattern": {r".*\.v_proj": 4.5},
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": r"lm_head.*",
        "layers_to_transform": [0, 1],
        "layers_pattern": "layers",
        "base_model_name_or_path": "tiny",
        "init_lora_weights": True,
        "bias": "none",
    }


def index_of(*names: object) -> dict[str, Any]:
    """The index of a sharded adapter: the site's A in the first file, other tensors in others."""
    tensors = [f"{_KEY}A.weight", *map(str, range(1, len(names)))]
    return {"metadata": {}, "weight_map": dict(zip(tensors, names, strict=True))}


def trtllm_arrays() -> tuple[Array, Array]:
    """The weights and the config of q_proj of layer 0: module 1, rank 2, k=8, n=6."""
    return np.ones((1, 1, 28), np.float32), np.array([[[1, 0, 2, 0]]], np.int32)


def npy_bytes(array: Array) -> bytes:
    """A `.npy` file."""
    stream = BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def onnx_adapter_bytes() -> bytes:
    """An `.onnx_adapter` file, by ONNX Runtime."""
    weights = {name: weight_of(name, tensor_from_numpy(w)) for name, w in pair().items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seed.onnx_adapter"
        save_onnxruntime(weights, path, "float32", "seed")
        return path.read_bytes()


def manifest_fields() -> dict[str, Any]:
    """The manifest of an engine that has a plan."""
    with tempfile.TemporaryDirectory() as folder:
        record = file_record(write(Path(folder), {"engine.plan": PLAN}) / "engine.plan")
    found = dataclasses.replace(make_manifest(), files={"engine.plan": record})
    fields: dict[str, Any] = json.loads(found.to_json())
    return fields
