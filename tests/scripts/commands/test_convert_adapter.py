"""`trt-lora convert-adapter`: any format to any other, `.bin` files read without a pickle."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TinyEngine
from safetensors.torch import load_file
from support.adapters.diffusion.models import assert_same as assert_same_deltas
from support.adapters.diffusion.models import deltas
from support.adapters.diffusion.writing import Writing

from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import read_manifest
from trt_lora.scripts.trt_lora_command import main

FORMATS = ("peft", "trtllm", "edgellm", "onnxruntime")


def convert(*arguments: str | Path) -> int:
    try:
        main(["convert-adapter", *(str(argument) for argument in arguments)])
    except SystemExit as exited:
        return int(exited.code or 0)
    return 0


def target(folder: Path, kind: str) -> Path:
    return folder / (f"{kind}.onnx_adapter" if kind == "onnxruntime" else kind)


def assert_same(path: Path, tiny_engine: TinyEngine) -> None:
    """The engine binds what it binds of the original."""
    manifest = read_manifest(tiny_engine.engine)
    ours = fit_adapter(load_adapter(path, manifest), manifest).tensors
    theirs = fit_adapter(load_adapter(tiny_engine.adapter), manifest).tensors
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name].numpy(), tensor.numpy(), err_msg=name)


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
def test_any_format_becomes_any_other(
    first: str, second: str, tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    between, last = target(tmp_path / "1", first), target(tmp_path / "2", second)
    options = ["--dtype", "float32", "--engine", str(tiny_engine.engine), "--format"]
    assert convert(tiny_engine.adapter, between, *options, first) == 0
    assert convert(between, last, *options, second) == 0
    assert_same(last, tiny_engine)


def test_json_says_what_was_written_and_what_changed(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--format", "peft", "--dtype", "bfloat16", "--json"]
    assert convert(tiny_engine.adapter, tmp_path / "a", *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found.pop("rounding_error") < 0.01
    assert found == {
        "output": str(tmp_path / "a"),
        "source": str(tiny_engine.adapter),
        "format": "peft",
        "tensors": 8,
        "flushed": 0,
    }


def test_peft_to_peft_needs_no_engine_and_keeps_every_bit(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    assert convert(tiny_engine.adapter, tmp_path / "a", "--format", "peft") == 0
    ours, theirs = (
        load_file(d / "adapter_model.safetensors") for d in (tmp_path / "a", tiny_engine.adapter)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ------------------------------------------------------------------------------------- .bin files


def bin_adapter(folder: Path, tiny_engine: TinyEngine, content: object) -> Path:
    """A PEFT directory with a `.bin`, as old releases of PEFT wrote them."""
    folder.mkdir()
    config = tiny_engine.adapter / "adapter_config.json"
    (folder / config.name).write_bytes(config.read_bytes())
    torch.save(content, folder / "adapter_model.bin")
    return folder


def test_a_bin_file_is_converted(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    tensors = load_file(tiny_engine.adapter / "adapter_model.safetensors")
    source = bin_adapter(tmp_path / "old", tiny_engine, tensors)
    assert convert(source, tmp_path / "a", "--format", "peft") == 0
    assert_same(tmp_path / "a", tiny_engine)
    assert convert(source / "adapter_model.bin", tmp_path / "b", "--format", "edgellm") == 0


class Opens:
    """What a pickle may do when it is read: here, create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_bin_file_that_runs_code_is_refused_before_it_does(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trap = tmp_path / "trap"
    source = bin_adapter(tmp_path / "old", tiny_engine, {"x": Opens(trap)})
    assert convert(source, tmp_path / "a", "--format", "peft") == 2
    assert not trap.exists()
    assert "does not hold tensors alone" in capsys.readouterr().err
    (source / "adapter_model.bin").write_bytes(pickle.dumps({"x": Opens(trap)}))
    assert convert(source, tmp_path / "a", "--format", "peft") == 2
    assert not trap.exists()
    assert not (tmp_path / "a").exists()


def test_a_bin_file_without_its_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({}, tmp_path / "adapter_model.bin")
    assert convert(tmp_path / "adapter_model.bin", tmp_path / "a", "--format", "peft") == 2
    assert "adapter_config.json beside it" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- refusals


def test_an_output_that_exists_is_kept(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").mkdir()
    assert convert(tiny_engine.adapter, tmp_path / "a", "--format", "peft") == 2
    assert "exists; choose another place" in capsys.readouterr().err


def test_tensorrt_llms_format_needs_an_engine(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tiny_engine.adapter, tmp_path / "a", "--format", "trtllm") == 0
    assert convert(tmp_path / "a", tmp_path / "b", "--format", "peft") == 2
    assert "--engine DIR" in capsys.readouterr().err


def test_a_component_of_a_diffusion_file_is_converted(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two text encoders with the same modules, each has to be asked for."""
    manifest = read_manifest(tiny_engine.engine)
    writing, site = Writing(manifest), manifest.sites[0]
    for number in (1, 2):
        writing.add(f"lora_te{number}_{site.path.replace('.', '_')}", site.path)
    file = writing.save(tmp_path / "a.safetensors")
    options = ["--format", "peft", "--engine", str(tiny_engine.engine)]
    assert convert(file, tmp_path / "b", *options) == 2
    assert "--component" in capsys.readouterr().err
    assert convert(file, tmp_path / "b", *options, "--component", "text_encoder_2") == 0
    assert_same_deltas(deltas(tmp_path / "b", manifest), writing.expected)


# ------------------------------------------------------------- a command line of hf_lora_convert.py


def test_the_storage_type_of_tensorrt_llm_is_the_dtype(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    options = ["--format", "peft", "--storage-type", "float16"]
    assert convert(tiny_engine.adapter, tmp_path / "a", *options) == 0
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


@pytest.mark.parametrize("option", ["-i", "--in-file", "-o", "--out-dir"])
def test_options_of_tensorrt_llm_for_input_and_output_are_told_where_these_stand(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {"-i": "x", "-o": "y", "--storage-type": "float16"}
    words = [option, "x", *(word for pair in others.items() for word in pair if pair[0] != option)]
    assert convert(*words) == 2
    assert capsys.readouterr().err == (
        f"error: {option} is of TensorRT-LLM's hf_lora_convert.py; here it is: "
        "trt-lora convert-adapter IN OUT --format trtllm\nsee: trt-lora convert-adapter --help\n"
    )
