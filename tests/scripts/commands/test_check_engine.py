"""`trt-lora check`: every file of an engine by its bytes, and what to do."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.commands import streams, trt_lora
from support.fakes.fake_cuda import FakeCuda

from trt_lora.runtime.manifest import ONNX_FILE, ONNX_WEIGHTS_FILE, read_manifest
from trt_lora.scripts.terminal.printing import byte_size


@pytest.fixture
def engine(tiny_engine: TinyEngine, tmp_path: Path) -> Path:
    """A copy of the tiny engine, to be damaged."""
    return shutil.copytree(tiny_engine.engine, tmp_path / "engine")


def check(capsys: pytest.CaptureFixture[str], *arguments: str | Path, expected: int = 0) -> str:
    return trt_lora(capsys, "check", *arguments, expected=expected)


def test_an_engine_that_is_whole_says_so(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = check(capsys, engine)
    assert printed.endswith(f"{engine}: whole\n")
    assert f"{ONNX_FILE} " in printed


def test_the_bytes_that_are_to_be_read_are_said_before(
    engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = streams(capsys, "check", engine, "--json")
    files = read_manifest(engine).files
    size = byte_size(sum(record.size_bytes for record in files.values()))
    assert err == f"reading {len(files)} files, {size}\n"
    assert json.loads(out)["whole"]


def test_one_flipped_byte_is_found(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = engine / ONNX_WEIGHTS_FILE
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    printed = check(capsys, engine, expected=1)
    (line,) = (line for line in printed.splitlines() if line.startswith(ONNX_WEIGHTS_FILE))
    assert "other contents" in line
    assert "1 of" in printed
    assert "copy or build it again" in printed


def test_every_fault_is_in_the_json(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(check(capsys, engine, "--json"))["whole"]
    (engine / ONNX_WEIGHTS_FILE).unlink()
    (engine / ONNX_FILE).write_bytes(b"")
    (engine / "notes.txt").write_text("mine")
    found = json.loads(check(capsys, engine, "--json", expected=1))
    assert found["whole"] is False
    assert found["faults"].keys() == {ONNX_FILE, ONNX_WEIGHTS_FILE}
    assert found["unlisted"] == ["notes.txt"]


def test_what_is_no_engine_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / ("x" * 300)):
        printed = check(capsys, path, expected=2)
        assert printed.startswith("error: ")
        assert str(path) in printed
        assert printed.count("\n") == 1


def test_without_a_gpu_a_doctor_finds_that_it_runs_on_the_cpu(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(devices=0).install(monkeypatch)
    printed = trt_lora(capsys, "doctor", tiny_engine.engine)
    assert "ONNX Runtime (cpu)  yes\n" in printed
    assert "TensorRT (cuda)     no: " in printed
