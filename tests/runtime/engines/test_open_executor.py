"""`open_executor`: which backend runs an engine here, and why not the other."""

import sys
from pathlib import Path

import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory, small_manifest

from trt_lora.plugins.errors import BackendError, ManifestError, TensorError
from trt_lora.runtime.engines.engine import check_inputs
from trt_lora.runtime.engines.onnxruntime.engine import OnnxRuntimeEngine
from trt_lora.runtime.engines.open_executor import BACKENDS, open_executor
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.manifest import MANIFEST_FILE, PLAN_FILE
from trt_lora.runtime.memory.tensor import Tensor, TensorMap


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The tiny model's engine directory."""
    return engine_directory(tmp_path / "engine")


def obstacle(directory: Path) -> str:
    """Return why TensorRT cannot run an engine; `auto` must then choose ONNX Runtime."""
    assert isinstance(open_executor(directory), OnnxRuntimeEngine)
    with pytest.raises(BackendError) as caught:
        open_executor(directory, "tensorrt")
    message = str(caught.value)
    assert message.startswith(f"{directory} cannot run on TensorRT here: ")
    return message


@pytest.mark.parametrize("backend", ["auto", "tensorrt"])
def test_tensorrt_runs_an_engine_where_a_gpu_its_library_and_a_plan_are_there(
    directory: Path, trt: FakeTensorRT, backend: str
) -> None:
    engine = open_executor(str(directory), backend)

    assert isinstance(engine, TensorRTEngine)
    assert engine.directory == directory
    assert engine.manifest.sites == small_manifest().sites


def test_opening_asks_for_gpus_and_attributes_and_nothing_else(
    directory: Path, trt: FakeTensorRT, cuda: FakeCuda
) -> None:
    open_executor(directory)

    device = "cudaGetDevice"
    assert cuda.names() == ["cudaGetDeviceCount", device, "cudaDeviceGetAttribute", device]
    assert not list(trt.contexts)


def test_an_opened_engine_runs_inside_with(directory: Path, trt: FakeTensorRT) -> None:
    with open_executor(directory) as engine:
        assert engine.memory.device == "cuda:0"
        assert len(list(trt.contexts)) == 1

    assert not list(trt.contexts)


def test_onnxruntime_is_taken_when_asked_for_and_cuda_is_left_alone(
    directory: Path, trt: FakeTensorRT, cuda: FakeCuda
) -> None:
    engine = open_executor(directory, "onnxruntime")

    assert isinstance(engine, OnnxRuntimeEngine)
    assert engine.memory.device == "cpu"
    assert not cuda.calls


def test_an_engine_of_full_tensorrt_needs_full_tensorrt(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = engine_directory(tmp_path / "engine", small_manifest("tensorrt"))
    full = FakeTensorRT(cuda, "tensorrt")
    full.install(monkeypatch)

    with open_executor(directory, "tensorrt") as engine:
        assert isinstance(engine, TensorRTEngine)
        assert len(list(full.contexts)) == 1


def test_auto_logs_which_backend_runs_and_why(
    directory: Path, trt: FakeTensorRT, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "trt_lora.runtime.engines.open_executor"):
        open_executor(directory)
        cuda.devices = 0
        open_executor(directory)
        open_executor(directory, "onnxruntime")  # asked for: nothing to explain

    assert [record.getMessage() for record in caplog.records] == [
        f"{directory} runs on tensorrt-rtx (GPU): it has a plan, and library and GPU are there",
        f"{directory} runs on ONNX Runtime (CPU): there is no NVIDIA GPU",
    ]


def test_auto_leaves_a_gpu_alone_that_the_library_does_not_support_and_warns(
    directory: Path, trt: FakeTensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    trt.supports("8.6", "12.0")
    with caplog.at_level("WARNING", "trt_lora.runtime.engines.open_executor"):
        assert isinstance(open_executor(directory), OnnxRuntimeEngine)
    (record,) = caplog.records
    assert "runs on ONNX Runtime (CPU): tensorrt-rtx supports GPUs of" in record.getMessage()
    assert "8.6, 12.0, and this one has 9.0; " in record.getMessage()

    with open_executor(directory, "tensorrt"):  # who asks for it may try
        pass
    trt.supports("8.6", "9.0")
    assert isinstance(open_executor(directory), TensorRTEngine)


@pytest.mark.parametrize("backend", ["cpu", "TensorRT", ""])
def test_an_unknown_backend_is_refused_with_the_known_ones(directory: Path, backend: str) -> None:
    with pytest.raises(BackendError) as caught:
        open_executor(directory, backend)

    assert str(caught.value) == f"unknown backend {backend!r}; choose from: {', '.join(BACKENDS)}"


def test_an_engine_without_a_plan_says_how_to_build_one(tmp_path: Path, trt: FakeTensorRT) -> None:
    directory = engine_directory(tmp_path / "engine", small_manifest("none"))

    assert "built with --flavour none and has no plan; build it again" in obstacle(directory)


@pytest.mark.parametrize(
    ("flavour", "module", "extra"),
    [("tensorrt-rtx", "tensorrt_rtx", "rtx"), ("tensorrt", "tensorrt", "tensorrt")],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    tmp_path: Path,
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    flavour: str,
    module: str,
    extra: str,
) -> None:
    directory = engine_directory(tmp_path / "engine", small_manifest(flavour))
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", [])

    message = obstacle(directory)

    assert f"its plan is for {flavour}, which is not installed" in message
    assert f"pip install 'trt-lora[{extra}]'" in message
    assert not cuda.calls


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (Status.cudaErrorInsufficientDriver, "CUDA driver version is insufficient"),
        (Status.cudaErrorNoDevice, "no CUDA-capable device is detected"),
        (RuntimeError("Failed to dlopen libcuda.so.1"), "Failed to dlopen libcuda.so.1"),
    ],
)
def test_a_missing_driver_or_gpu_is_the_reason_in_the_words_of_nvidia(
    directory: Path,
    trt: FakeTensorRT,
    cuda: FakeCuda,
    reason: Status | RuntimeError,
    message: str,
) -> None:
    cuda.fail("cudaGetDeviceCount", reason)
    assert isinstance(open_executor(directory), OnnxRuntimeEngine)

    cuda.fail("cudaGetDeviceCount", reason)
    with pytest.raises(BackendError, match=message):
        open_executor(directory, "tensorrt")


def test_a_machine_with_no_gpus_says_so(directory: Path, trt: FakeTensorRT, cuda: FakeCuda) -> None:
    cuda.devices = 0

    assert "there is no NVIDIA GPU" in obstacle(directory)


def test_a_missing_cuda_python_is_the_reason_with_the_way_to_install_it(
    directory: Path, trt: FakeTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)

    assert "cuda-python cannot be imported" in obstacle(directory)


def test_a_bfloat16_engine_without_a_gpu_says_that_onnxruntime_cannot_run_it(
    tmp_path: Path, trt: FakeTensorRT, cuda: FakeCuda
) -> None:
    directory = engine_directory(tmp_path / "engine", small_manifest(dtype="bfloat16"))
    cuda.devices = 0

    with pytest.raises(BackendError, match=r"bfloat16 engine.*run it with TensorRT on a GPU"):
        open_executor(directory)


def test_a_directory_that_is_no_engine_is_refused_before_cuda_is_asked(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    with pytest.raises(ManifestError, match=f"has no {MANIFEST_FILE}: it is not an engine"):
        open_executor(tmp_path)

    assert not cuda.calls


def test_a_plan_that_is_incomplete_is_refused_before_cuda_is_asked(
    directory: Path, cuda: FakeCuda
) -> None:
    (directory / PLAN_FILE).write_bytes(b"half a plan")

    with pytest.raises(ManifestError, match="the engine is incomplete"):
        open_executor(directory)
    assert not cuda.calls


def test_a_map_with_every_input_passes_and_may_hold_more() -> None:
    tensor = Tensor(0, (1,), "float32")

    check_inputs(TensorMap(a=tensor, b=tensor, more=tensor), ["a", "b"])


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["a"], "lacks a; "),
        (["a", "b", "c"], "lacks a, b, c; "),
        (["a", "b", "c", "d", "e"], "lacks a, b, c and 2 more; "),
    ],
)
def test_missing_inputs_are_named_three_at_most(missing: list[str], said: str) -> None:
    tensor_map = TensorMap(there=Tensor(0, (1,), "float32"))

    with pytest.raises(TensorError, match=said):
        check_inputs(tensor_map, ["there", *missing])
