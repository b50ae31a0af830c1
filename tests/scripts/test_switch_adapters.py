"""The script that users copy from: every bad adapter gets one message and exit 2."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import TinyEngine
from safetensors.numpy import load_file, save_file
from support.models.tiny_models import save_adapter, save_model

from trt_lora.scripts.switch_adapters import main

WEIGHTS = "adapter_model.safetensors"


def refusal(
    capsys: pytest.CaptureFixture[str], engine: Path, *adapters: str, backend: str = "auto"
) -> str:
    """Run the script, which must exit with 2, and return its one-line message."""
    named = [word for adapter in adapters for word in ("--adapter", adapter)]
    with pytest.raises(SystemExit) as raised:
        main(["--engine", str(engine), *named, "--prompt", "hi", "--backend", backend])
    assert raised.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    return message


def without_config(adapter: Path) -> None:
    (adapter / "adapter_config.json").unlink()


def truncated(adapter: Path) -> None:
    data = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(data[:-10])


def claiming_too_much(adapter: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [9999], "data_offsets": [0, 39996]}})
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * 16)


def with_a_huge_header(adapter: Path) -> None:
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + b"{}")


def _edited(adapter: Path, value: float) -> None:
    tensors = load_file(adapter / WEIGHTS)
    name = next(iter(tensors))
    tensors[name] = tensors[name].copy()
    tensors[name][0, 0] = value
    save_file(tensors, adapter / WEIGHTS)


def with_nan(adapter: Path) -> None:
    _edited(adapter, np.nan)


def with_infinity(adapter: Path) -> None:
    _edited(adapter, np.inf)


def without_half_a_pair(adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS)
    del tensors[next(name for name in tensors if "lora_B" in name)]
    save_file(tensors, adapter / WEIGHTS)


def with_dora(adapter: Path) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_config, "has no adapter_config.json: it is not a PEFT adapter directory"),
        (truncated, "is not a valid safetensors file"),
        (claiming_too_much, "is not a valid safetensors file"),
        (with_a_huge_header, "is not a valid safetensors file"),
        (with_nan, "holds NaN or infinity"),
        (with_infinity, "holds NaN or infinity"),
        (without_half_a_pair, "is missing from its pair"),
        (with_dora, "use_dora is True: DoRA rescales the base weight"),
    ],
)
def test_a_damaged_adapter_is_refused_by_name(
    damage: Callable[[Path], None],
    message: str,
    tiny_engine: TinyEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter = tmp_path / "damaged"
    shutil.copytree(tiny_engine.adapter, adapter)
    damage(adapter)
    said = refusal(capsys, tiny_engine.engine, f"a={adapter}")
    assert message in said
    assert str(adapter) in said


def test_a_rank_above_the_engines_is_refused_with_the_option_to_build_with(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = save_adapter(tiny_engine.model, tmp_path / "w", r=17, target_modules=["q_proj"])
    said = refusal(capsys, tiny_engine.engine, f"a={wide}")
    assert "has rank 17; this engine takes 1 to 16. Build it with --max-lora-rank 17" in said


def test_a_module_without_a_site_is_refused_with_those_there_are(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_adapter(tiny_engine.model, tmp_path / "o", r=2, target_modules=["o_proj"])
    said = refusal(capsys, tiny_engine.engine, f"a={other}")
    assert "module model.layers.0.self_attn.o_proj has no site in this engine" in said
    assert "takes LoRA on q_proj, v_proj" in said


def test_an_adapter_of_another_base_model_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gemma = save_model("Gemma2", tmp_path / "gemma")
    adapter = save_adapter(gemma, tmp_path / "g", r=2, target_modules=["q_proj", "v_proj"])
    tensors = load_file(adapter / WEIGHTS)
    wider = {k: np.zeros((2, 64), np.float32) if "lora_A" in k else v for k, v in tensors.items()}
    save_file(wider, adapter / WEIGHTS)
    said = refusal(capsys, tiny_engine.engine, f"a={adapter}")
    assert "in the file [2, 64], expected [r, k] with k=32" in said
    assert "was trained on another base model" in said


def test_two_adapters_of_one_name_are_refused(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"a={tiny_engine.adapter}"
    assert "--adapter names two adapters 'a'" in refusal(capsys, tiny_engine.engine, named, named)


@pytest.mark.parametrize("argument", ["json", "=path", "name="])
def test_an_adapter_argument_of_another_form_is_refused(
    argument: str, tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected NAME=PATH" in refusal(capsys, tiny_engine.engine, argument)


def test_an_engine_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not an engine directory" in refusal(capsys, tmp_path)


def test_an_impossible_backend_says_why(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, tiny_engine.engine, backend="tensorrt")
    assert "it was built with --flavour none and has no plan" in said


def test_an_engine_without_a_tokenizer_says_so(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, tiny_engine.engine, f"a={tiny_engine.adapter}")
    assert "has no tokenizer.json; pass prompts as lists of token ids" in said
