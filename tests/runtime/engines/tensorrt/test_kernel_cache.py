"""`runtime/engines/tensorrt/plan.py`: TensorRT-RTX's kernels in a file beside the plan."""

import logging
from pathlib import Path

import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_tensorrt import FakeTensorRT
from support.fakes.tiny_engine import engine_directory, small_manifest
from support.models.tiny_model_runs import bound_prompt

from trt_lora.runtime import read_manifest
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.manifest import RUNTIME_CACHE_FILE


def run_once(engine: TensorRTEngine) -> Path:
    """Run a prompt, close the engine and return the path of its cache."""
    with engine:
        engine.execute(bound_prompt(engine))
    return engine.directory / RUNTIME_CACHE_FILE


def test_a_closed_engine_leaves_its_kernels_beside_the_plan(engine: TensorRTEngine) -> None:
    file = run_once(engine)

    assert b"input_ids[1, 5]" in file.read_bytes()
    assert sorted(path.name for path in engine.directory.iterdir()) == [
        "engine.plan",
        "manifest.json",
        "model.onnx",
        "model.onnx.data",
        RUNTIME_CACHE_FILE,
    ]
    read_manifest(engine.directory)  # has no objection


def test_the_next_engine_starts_with_them_and_adds_its_own(engine: TensorRTEngine) -> None:
    file = run_once(engine)
    before = file.read_bytes().splitlines()
    with engine:
        engine.warm_up()

    after = file.read_bytes().splitlines()
    assert set(before) < set(after)


def test_a_file_that_would_stay_the_same_is_not_written(engine: TensorRTEngine) -> None:
    before = run_once(engine).stat()
    after = run_once(engine).stat()

    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("content", [b"", b"damaged", b"another GPU and its driver\nkernel"])
def test_a_damaged_or_foreign_file_is_ignored_with_a_line_in_the_log_and_replaced(
    engine: TensorRTEngine, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    file = engine.directory / RUNTIME_CACHE_FILE
    file.write_bytes(content)
    with caplog.at_level(logging.INFO):
        run_once(engine)

    assert [message.split(" is ")[0] for message in caplog.messages] == [str(file)]
    assert b"input_ids[1, 5]" in file.read_bytes()


def test_a_file_that_can_neither_be_read_nor_written_is_no_error(
    engine: TensorRTEngine, caplog: pytest.LogCaptureFixture
) -> None:
    (engine.directory / RUNTIME_CACHE_FILE).mkdir()
    with caplog.at_level(logging.INFO):
        run_once(engine)

    assert ["ignored" in m or "not written" in m for m in caplog.messages] == [True, True]


def test_a_directory_that_cannot_be_written_to_is_no_error(
    engine: TensorRTEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with caplog.at_level(logging.INFO):
        file = run_once(engine)

    assert not file.exists()
    assert "not written" in caplog.text


def test_a_cache_that_cannot_be_serialized_is_no_error(
    engine: TensorRTEngine, trt: FakeTensorRT
) -> None:
    trt.refusals.add("serialize")

    assert not run_once(engine).exists()


def test_an_engine_that_failed_keeps_what_it_compiled(engine: TensorRTEngine) -> None:
    def run() -> None:
        with engine:
            engine.execute(bound_prompt(engine))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert (engine.directory / RUNTIME_CACHE_FILE).exists()


def test_full_tensorrt_has_no_such_file(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    FakeTensorRT(cuda, "tensorrt").install(monkeypatch)
    manifest = small_manifest(flavour="tensorrt")
    file = run_once(TensorRTEngine(engine_directory(tmp_path / "engine", manifest), manifest))

    assert not file.exists()
