"""`trt-lora doctor`: the machine, and where an engine can run, on fakes of two GPUs and of none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import trt_lora
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory, small_manifest

from trt_lora.runtime.engines.engine import EngineExecutor
from trt_lora.runtime.engines.open_executor import open_executor
from trt_lora.scripts.diagnosis import machine, places


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeCuda]:
    """Two GPUs, their driver, and a TensorRT-RTX."""
    fake = FakeCuda(devices=2)
    fake.install(monkeypatch)
    FakeTensorRT(fake).install(monkeypatch)
    driver = tmp_path / "driver"
    driver.write_text("NVIDIA UNIX x86_64 Kernel Module  580.65.06  Release Build")
    monkeypatch.setattr(machine, "DRIVER_FILE", driver)
    yield fake
    fake.check()


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """The engine of the fake TensorRT-RTX, whose manifest has no ONNX file."""
    return engine_directory(tmp_path / "engine")


def doctor(capsys: pytest.CaptureFixture[str], *words: str | Path, expected: int = 0) -> Any:
    return json.loads(trt_lora(capsys, "doctor", *words, "--json", expected=expected))


def obstacles(found: Any) -> dict[str, str]:
    """Why the engine cannot run, by device."""
    return {place["device"]: place["obstacle"] for place in found["engine"]["places"]}


def test_every_gpu_is_named_with_its_free_memory(
    cuda: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = trt_lora(capsys, "doctor")
    assert "driver        580.65.06, for CUDA up to 13.0\n" in printed
    for line in (
        "GPU 0         Fake GPU 0, compute capability 9.0, 1.1 of 1.1 GB free\n",
        "GPU 1         Fake GPU 1, compute capability 9.1, 1.1 of 1.1 GB free\n",
        "tensorrt-rtx  usable, with the LoRA plugin\n",
    ):
        assert line in printed
    assert cuda.current_device == 0


def test_an_engine_is_opened_on_every_gpu_and_on_the_cpu(
    cuda: FakeCuda,
    planned: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = []

    def noted(directory: Path, backend: str) -> EngineExecutor:
        opened.append((backend, cuda.current_device))
        return open_executor(directory, backend)

    monkeypatch.setattr(places, "open_executor", noted)
    found = doctor(capsys, planned)
    assert opened == [("tensorrt", 0), ("tensorrt", 1), ("onnxruntime", 0)]
    assert found["engine"]["runs"] is True
    why = obstacles(found)
    assert (why["cuda:0"], why["cuda:1"]) == ("", "")
    assert "model.onnx" in why["cpu"]


def test_a_gpu_that_fails_takes_nothing_from_the_other(
    cuda: FakeCuda, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda.fail("cudaGetDeviceProperties", Status.cudaErrorMemoryAllocation)  # the first call
    found = doctor(capsys, planned)
    first, second = found["gpus"]
    assert "cudaGetDeviceProperties" in first["obstacle"]
    assert (second["name"], second["obstacle"]) == ("Fake GPU 1", "")


def test_an_engine_that_can_run_nowhere_exits_with_1_and_says_why_of_each_backend(
    cuda: FakeCuda, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cuda.devices = 0
    found = doctor(capsys, planned, expected=1)
    assert found["engine"]["runs"] is False
    why = obstacles(found)
    assert "there is no NVIDIA GPU" in why["cuda"]
    assert "model.onnx" in why["cpu"]
    assert "no: " in trt_lora(capsys, "doctor", planned, expected=1)


def test_a_plan_of_a_library_that_is_missing_is_said_with_the_way_to_install_it(
    cuda: FakeCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = engine_directory(tmp_path / "full", small_manifest("tensorrt"))
    found = doctor(capsys, directory, expected=1)
    assert "pip install 'trt-lora[tensorrt]'" in obstacles(found)["cuda:0"]
    states = {flavour["name"]: flavour["obstacle"] for flavour in found["flavours"]}
    assert states == {
        "tensorrt": "not installed; pip install 'trt-lora[tensorrt]'",
        "tensorrt-rtx": "",
    }


def test_a_damaged_file_is_an_obstacle_everywhere(
    cuda: FakeCuda, planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (planned / "engine.plan").write_bytes(b"half a plan")
    found = doctor(capsys, planned, expected=1)
    assert all("the engine is incomplete" in why for why in obstacles(found).values())


def test_what_is_no_engine_is_refused_before_the_machine_is_asked(
    cuda: FakeCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = trt_lora(capsys, "doctor", tmp_path / "nowhere", expected=2)
    assert "nowhere does not exist" in printed
    assert not cuda.calls


def test_the_exit_status_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    printed = " ".join(trt_lora(capsys, "doctor", "--help").split())
    assert "exit status is 0 if it can run somewhere and 1 if it can run nowhere" in printed
