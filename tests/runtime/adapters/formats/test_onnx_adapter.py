"""`.onnx_adapter` files: what ONNX Runtime writes is read, what is written ONNX Runtime runs."""

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import TinyEngine
from safetensors.numpy import load_file
from support.fakes.fake_engine import make_manifest, make_weights, write_peft
from support.models.quick_build import quick_build
from support.models.tiny_models import VOCABULARY, save_adapter, save_model, tiny_config

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import save_adapter as save_as
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import token_inputs
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.host import HostMemory
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.needs_torch

DTYPES = ["float32", "float16", "bfloat16"]
# It says that it takes any path, and takes texts alone.
ADAPTER_FORMAT: Any = onnxruntime.AdapterFormat
BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16
Q = "model.layers.0.self_attn.q_proj"
A, B = f"lora_A_{Q}", f"lora_B_{Q}"


def torch_values(values: Array, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, dtype))


def ort_value(values: Array, dtype: str) -> Any:
    if dtype == "bfloat16":
        bits = torch_values(values, dtype).view(torch.int16).numpy().view(np.uint16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(values.astype(dtype))


def write(path: Path, values: Mapping[str, Any]) -> Path:
    """A file by ONNX Runtime itself."""
    adapter = ADAPTER_FORMAT()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters(dict(values))
    adapter.export_adapter(str(path))
    return path


def read(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every parameter, by ONNX Runtime itself."""
    adapter = ADAPTER_FORMAT.read_adapter(str(path))
    return {
        name: (value.data_type(), ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes()))
        for name, value in adapter.get_parameters().items()
    }


def bits(values: Array, dtype: str) -> bytes:
    return torch_values(values, dtype).view(torch.uint8).numpy().tobytes()


def peft(directory: Path, **fields: object) -> tuple[Path, Array, Array]:
    a, b = np.random.default_rng(0).standard_normal(16, np.float32), np.arange(12, dtype=np.float32)
    tensors = {f"{Q}.lora_A": a.reshape(2, 8), f"{Q}.lora_B": b.reshape(6, 2)}
    return write_peft(directory, tensors, **fields), tensors[f"{Q}.lora_A"], tensors[f"{Q}.lora_B"]


# ----------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_onnx_runtime_writes_is_read(tmp_path: Path, dtype: str) -> None:
    weights = make_weights(make_manifest())
    values = {name: ort_value(array, dtype) for name, array in weights.items()}
    adapter = load_adapter(write(tmp_path / "a.onnx_adapter", values))
    assert adapter.weights.keys() == weights.keys()
    for name, array in weights.items():
        weight = adapter.weights[name]
        assert (weight.dtype, weight.shape, weight.scale) == (dtype, array.shape, 1)
        expected = torch_values(array, dtype).to(torch.float32).numpy()
        np.testing.assert_array_equal(weight.values(), expected)


def test_a_file_may_be_replaced_or_truncated_once_it_is_opened(tmp_path: Path) -> None:
    weights = make_weights(make_manifest())
    values = {name: ort_value(array, "float32") for name, array in weights.items()}
    path = write(tmp_path / "a.onnx_adapter", values)
    adapter = load_adapter(path)
    path.write_bytes(b"")
    for name, array in weights.items():
        np.testing.assert_array_equal(adapter.weights[name].values(), array)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """The bytes of a file that is not damaged."""
    weights = make_weights(make_manifest())
    values = {name: ort_value(array, "float32") for name, array in weights.items()}
    return write(tmp_path / "whole.onnx_adapter", values).read_bytes()


def assert_refused(path: Path, data: bytes, message: str = "not a valid .onnx_adapter") -> None:
    path.write_bytes(data)
    with pytest.raises(AdapterError, match=message) as caught:
        load_adapter(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 64, 4096])
def test_random_bytes_are_refused(tmp_path: Path, size: int) -> None:
    assert_refused(tmp_path / "a.onnx_adapter", np.random.default_rng(size).bytes(size))


@pytest.mark.parametrize("part", [0.01, 0.25, 0.5, 0.75, 0.95])
def test_a_truncated_file_is_refused(tmp_path: Path, whole: bytes, part: float) -> None:
    assert_refused(tmp_path / "a.onnx_adapter", whole[: int(part * len(whole))])


def test_another_identifier_is_refused(tmp_path: Path, whole: bytes) -> None:
    assert whole[4:8] == b"TORT"
    assert_refused(tmp_path / "a.onnx_adapter", whole[:4] + b"TFL3" + whole[8:])


def test_a_file_without_parameters_is_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty", {}).read_bytes()
    assert_refused(tmp_path / "a.onnx_adapter", empty, "holds no parameters")


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int8])
def test_another_dtype_is_refused(tmp_path: Path, dtype: type) -> None:
    values = {A: onnxruntime.OrtValue.ortvalue_from_numpy(np.ones((8, 2), dtype))}
    with pytest.raises(AdapterError, match=A):
        load_adapter(write(tmp_path / "a.onnx_adapter", values))


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="No such file"):
        load_adapter(tmp_path / "nowhere.onnx_adapter")
    (tmp_path / "a.onnx_adapter").mkdir()
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        load_adapter(tmp_path / "a.onnx_adapter")


def test_flipped_bytes_end_in_a_refusal_or_an_adapter(tmp_path: Path, whole: bytes) -> None:
    path, rng, refused = tmp_path / "a.onnx_adapter", np.random.default_rng(0), 0
    for _ in range(500):
        damaged = bytearray(whole)
        damaged[rng.integers(len(whole))] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            load_adapter(path).in_memory()
        except AdapterError:
            refused += 1
    assert refused > 50


# ----------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_onnx_runtime_reads(tmp_path: Path, dtype: str) -> None:
    source, a, b = peft(tmp_path / "peft", lora_alpha=6)
    save_as(load_adapter(source), tmp_path / "a.onnx_adapter", "onnxruntime", dtype=dtype)
    kind = {"float32": "tensor(float)"}.get(dtype, f"tensor({dtype})")
    assert read(tmp_path / "a.onnx_adapter") == {
        A: (kind, bits(a.T, dtype)),
        B: (kind, bits(b.T * np.float32(3), dtype)),
    }


def test_with_a_manifest_every_lora_input_is_there(tmp_path: Path) -> None:
    manifest = make_manifest()
    source, _, b = peft(tmp_path / "peft")
    save_as(load_adapter(source), tmp_path / "a.onnx_adapter", "onnxruntime", manifest=manifest)
    found = ADAPTER_FORMAT.read_adapter(str(tmp_path / "a.onnx_adapter"))
    parameters = found.get_parameters()
    assert parameters.keys() == manifest.lora_bindings.keys()
    np.testing.assert_array_equal(parameters[B].numpy(), b.T)
    for name, (site, factor) in manifest.lora_bindings.items():
        if name not in (A, B):  # as a dummy: rank 1, zero
            np.testing.assert_array_equal(parameters[name].numpy(), np.zeros(site.shape(factor, 1)))


@pytest.mark.parametrize("engine", DTYPES)
@pytest.mark.parametrize("adapter", ["float32", "float16"])
def test_with_a_manifest_the_dtype_is_the_engines(
    tmp_path: Path, engine: str, adapter: str
) -> None:
    """ONNX Runtime feeds parameters as they are, and refuses another dtype than the input's."""
    half = np.ones((2, 8), adapter), np.ones((6, 2), adapter)
    source = write_peft(tmp_path / "peft", {f"{Q}.lora_A": half[0], f"{Q}.lora_B": half[1]})
    manifest = make_manifest(dtype=engine)
    save_as(load_adapter(source), tmp_path / "a.onnx_adapter", "onnxruntime", manifest=manifest)
    kind = {"float32": "tensor(float)"}.get(engine, f"tensor({engine})")
    assert {found for found, _ in read(tmp_path / "a.onnx_adapter").values()} == {kind}


def test_a_value_beyond_the_range_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source, _, _ = peft(tmp_path / "peft", lora_alpha=1e6)
    with pytest.raises(AdapterError, match="beyond the range of float16"):
        save_as(load_adapter(source), tmp_path / "a.onnx_adapter", "onnxruntime", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["peft"]


# --------------------------------------------------------------------------------- in ONNX Runtime


def logits_of(engine: Path, adapter: Path, ids: Array) -> Array:
    """The engine's graph in a plain session, its LoRA inputs fed by the adapter alone."""
    manifest, loaded = read_manifest(engine), onnxruntime.LoraAdapter()
    loaded.Load(str(adapter))
    options = onnxruntime.RunOptions()
    options.add_active_adapter(loaded)
    rows, width = ids.shape
    cache = {
        name: tensor.numpy()
        for name, tensor in KVCache(manifest, HostMemory(), rows).views(0, rows).items()
    }
    lengths, kept = np.zeros(rows, np.int64), np.arange(ids.size)
    feeds: dict[str, Array] = {**cache, **token_inputs(ids, lengths, kept, width)}
    assert feeds.keys() == {b.name for b in manifest.inputs} - manifest.lora_bindings.keys()
    session: Any = onnxruntime.InferenceSession(
        engine / "model.onnx", providers=["CPUExecutionProvider"]
    )
    # The Python class around the session asks for every input before it looks at adapters; the
    # session itself, which is what other languages call, does not.
    (logits,) = session._sess.run(["logits"], feeds, options)
    return np.asarray(logits).reshape(rows, width, -1)


IDS = np.random.default_rng(0).integers(3, VOCABULARY, (2, 9))


def assert_close_to_peft(engine: Path, converted: Path, model: Path, adapter: Path) -> None:
    reference = PeftReference(model, {"a": adapter})
    expected = reference.logits("a", IDS, np.ones_like(IDS))
    found = logits_of(engine, converted, IDS)
    assert np.abs(found - expected).max() < 1e-4
    base = reference.logits("", IDS, np.ones_like(IDS))
    assert np.abs(expected - base).max() > 0.1  # the adapter does something


@pytest.mark.slow
def test_a_session_runs_the_converted_adapter_as_peft_does(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    manifest = read_manifest(tiny_engine.engine)
    converted = tmp_path / "a.onnx_adapter"
    save_as(load_adapter(tiny_engine.adapter), converted, "onnxruntime", manifest=manifest)
    assert_close_to_peft(tiny_engine.engine, converted, tiny_engine.model, tiny_engine.adapter)


@pytest.mark.slow
def test_a_session_runs_an_adapter_of_some_sites_and_mixed_ranks_as_peft_does(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    adapter = save_adapter(
        tiny_engine.model,
        tmp_path / "peft",
        seed=3,
        r=3,
        lora_alpha=5,
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.v_proj": 7},
        target_modules=["layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj"],
    )
    manifest = read_manifest(tiny_engine.engine)
    converted = tmp_path / "a.onnx_adapter"
    save_as(load_adapter(adapter), converted, "onnxruntime", manifest=manifest)
    assert_close_to_peft(tiny_engine.engine, converted, tiny_engine.model, adapter)


def split(source: Path, directory: Path) -> Path:
    """The same PEFT adapter with the parts of fused linears as modules of their own."""
    parts = {
        "qkv_proj": {"q_proj": 32, "k_proj": 16, "v_proj": 16},
        "gate_up_proj": {"gate_proj": 48, "up_proj": 48},
    }
    tensors: dict[str, Array] = {}
    for name, array in load_file(source / "adapter_model.safetensors").items():
        path = name.removeprefix("base_model.model.").removesuffix(".weight")
        widths = next((w for fused, w in parts.items() if fused in path), {"": len(array)})
        fused = next((fused for fused in parts if fused in path), "")
        start = 0
        for part, width in widths.items():
            of_part = array if "lora_A" in name else array[start : start + width]
            tensors[path.replace(fused, part) if fused else path] = of_part.copy()
            start += width
    return write_peft(directory, tensors, r=4, lora_alpha=6)


@pytest.mark.slow
def test_a_session_runs_a_split_adapter_on_a_fused_engine_as_peft_does(tmp_path: Path) -> None:
    model = save_model("Phi3", tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "fused", r=4, lora_alpha=6)
    quick_build(tiny_config(model, tmp_path / "engine"))
    manifest, converted = read_manifest(tmp_path / "engine"), tmp_path / "a.onnx_adapter"
    parts = load_adapter(split(adapter, tmp_path / "split"))
    assert any("k_proj" in name for name in parts.weights)
    save_as(parts, converted, "onnxruntime", manifest=manifest)
    assert_close_to_peft(tmp_path / "engine", converted, model, adapter)
