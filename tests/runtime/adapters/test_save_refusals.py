"""Saving is refused, or fails, without a trace."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import safetensors
from safetensors.numpy import load_file, save_file
from support.adapters.saved_adapters import MANIFEST, WEIGHTS, peft
from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.contract.sites import FACTORS
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import FORMATS, save_adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.memory.tensor import tensor_from_numpy


@pytest.fixture(autouse=True)
def no_scratch_files(tmp_path: Path) -> Iterator[None]:
    """Whatever a test does, nothing hidden is left behind."""
    yield
    assert [path.name for path in tmp_path.rglob(".*")] == []


@pytest.mark.parametrize(
    ("format", "dtype", "message"),
    [
        ("gguf", None, "format is 'gguf'; choose from: peft, trtllm, edgellm, onnxruntime"),
        ("peft", "int8", "dtype is 'int8'; choose from: float32, float16, bfloat16"),
    ],
)
def test_another_format_or_dtype_is_refused(
    tmp_path: Path, format: str, dtype: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        save_adapter(load_adapter(peft(tmp_path / "a")), tmp_path / "out", format, dtype=dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("directory", [True, False])
def test_what_is_there_already_is_never_replaced(
    tmp_path: Path, format: str, directory: bool
) -> None:
    adapter, path = load_adapter(peft(tmp_path / "source")), tmp_path / "out"
    if directory:
        path.mkdir()
    else:
        path.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="out exists; choose another place"):
        save_adapter(adapter, path, format)
    assert list(path.iterdir()) == [] if directory else path.read_text(encoding="utf-8") == "mine"


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, format: str) -> None:
    arrays = {
        f"lora_{factor}_{site.path}": np.full(site.shape(factor, 2), 1e6, np.float32)
        for site in MANIFEST.sites
        for factor in FACTORS
    }
    weights = {name: weight_of(name, tensor_from_numpy(array)) for name, array in arrays.items()}
    out = tmp_path / "folder" / "out"
    out.parent.mkdir()
    with pytest.raises(AdapterError, match="beyond the range of float16"):
        save_adapter(
            Adapter("memory", weights), tmp_path / "folder" / "out", format, dtype="float16"
        )
    assert names_in(out.parent) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(load_adapter(peft(tmp_path / "source")), tmp_path / "out", "trtllm")
    assert names_in(tmp_path) == ["source"]


@pytest.mark.parametrize(
    ("format", "library", "function", "error"),
    [
        ("peft", safetensors, "serialize_file", safetensors.SafetensorError("no space")),
        ("onnxruntime", onnxruntime.AdapterFormat, "export_adapter", RuntimeError("no space")),
    ],
)
def test_a_library_that_cannot_write_is_an_error_of_the_system(
    format: str,
    library: object,
    function: str,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(library, function, fail)
    with pytest.raises(OSError, match="cannot be written"):
        save_adapter(load_adapter(peft(tmp_path / "source")), tmp_path / "out", format)
    assert names_in(tmp_path) == ["source"]


@pytest.mark.parametrize("format", FORMATS)
def test_an_adapter_that_does_not_fit_the_engine_is_not_written(
    tmp_path: Path, format: str
) -> None:
    adapter = load_adapter(peft(tmp_path / "source"))
    with pytest.raises(AdapterError, match="another base model"):
        save_adapter(adapter, tmp_path / "out", format, manifest=make_manifest(k=9))
    assert names_in(tmp_path) == ["source"]


def test_a_tensor_that_nothing_can_take_is_refused_by_its_name(tmp_path: Path) -> None:
    source = peft(tmp_path / "source")
    name = "base_model.model.model.embed_positions.lora_embedding_A"
    save_file({**load_file(source / WEIGHTS), name: np.ones((2, 3), np.float32)}, source / WEIGHTS)
    for format in FORMATS:
        with pytest.raises(AdapterError, match=f"{name} cannot be used: it adapts an embed"):
            save_adapter(load_adapter(source), tmp_path / "out", format)
    assert names_in(tmp_path) == ["source"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_name_that_is_no_binding_is_refused(tmp_path: Path, format: str) -> None:
    save_file({"any name": np.ones((2, 3), np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(AdapterError, match="'any name' is not the name of a LoRA binding"):
        save_adapter(load_adapter(tmp_path / "a.safetensors"), tmp_path / "out", format)
    assert names_in(tmp_path) == ["a.safetensors"]
