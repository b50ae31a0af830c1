"""An engine's files: whole, or refused by name; by a sample when it is opened, by every byte."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import TinyEngine
from support.fakes.fake_engine import make_manifest
from support.fakes.fake_tensorrt import FakeTensorRT

from trt_lora.plugins.errors import ConfigError, ManifestError
from trt_lora.runtime import open_engine
from trt_lora.runtime.engines.engine_files import check_files, compare_files
from trt_lora.runtime.engines.open_executor import open_executor
from trt_lora.runtime.files.file_record import file_record, sampled_sha256
from trt_lora.runtime.manifest import (
    MANIFEST_FILE,
    ONNX_FILE,
    ONNX_WEIGHTS_FILE,
    PLAN_FILE,
    Manifest,
    read_manifest,
)

LARGE = 5_000_000  # bytes: more than the sample


@pytest.fixture
def engine(tiny_engine: TinyEngine, tmp_path: Path) -> Path:
    """A copy of the tiny engine, to be damaged."""
    return shutil.copytree(tiny_engine.engine, tmp_path / "engine")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """An engine directory of both backends, with files larger than their sample; none can run."""
    directory, rng = tmp_path / "large", np.random.default_rng(0)
    directory.mkdir()
    for name in (PLAN_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE):
        (directory / name).write_bytes(rng.bytes(LARGE))
    files = {path.name: file_record(path) for path in directory.iterdir()}
    manifest = dataclasses.replace(make_manifest(), files=files, flavour="tensorrt-rtx")
    (directory / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return directory


def zeroed(data: bytearray) -> None:
    data[:] = bytes(len(data))


def half_zeroed(data: bytearray) -> None:
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)


def flipped(data: bytearray) -> None:
    data[len(data) // 3] ^= 1


def cut(data: bytearray) -> None:
    del data[-1]


def damage(file: Path, change: Callable[[bytearray], object]) -> None:
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(data)


def assert_refused(directory: Path, name: str, check: str = "fast", *messages: str) -> None:
    """Refused with the file and the next step, on one line."""
    with pytest.raises(ManifestError) as caught:
        open_engine(directory, "onnxruntime", check=check)
    message = str(caught.value)
    expected = (str(directory / name), "the manifest says", "build", *messages)
    assert [text for text in expected if text not in message] == []
    assert "\n" not in message


# ------------------------------------------------------------------------------------ when opening


@pytest.mark.parametrize("check", ["fast", "full"])
@pytest.mark.parametrize("change", [zeroed, half_zeroed, flipped, cut])
@pytest.mark.parametrize("name", [ONNX_FILE, ONNX_WEIGHTS_FILE])
def test_a_damaged_file_of_up_to_1_5_mib_is_refused(
    engine: Path, name: str, change: Callable[[bytearray], None], check: str
) -> None:
    damage(engine / name, change)
    assert_refused(engine, name, check)


@pytest.mark.parametrize("change", [zeroed, half_zeroed])
def test_zeroed_halves_of_large_files_are_refused(
    large: Path, change: Callable[[bytearray], None]
) -> None:
    damage(large / ONNX_WEIGHTS_FILE, change)
    assert_refused(large, ONNX_WEIGHTS_FILE, "fast", f"trt-lora check {large}")


def test_a_whole_engine_opens_and_runs_with_either_check(tiny_engine: TinyEngine) -> None:
    for check in ("fast", "full"):
        with open_engine(tiny_engine.engine, "onnxruntime", check=check) as engine:
            assert engine.input_names


def test_files_of_another_build_are_refused(engine: Path, large: Path) -> None:
    shutil.copy(large / ONNX_FILE, engine / ONNX_FILE)
    assert_refused(engine, ONNX_FILE, "fast", f"has {LARGE} bytes")
    record = file_record(engine / ONNX_FILE)
    other = np.random.default_rng(1).bytes(record.size_bytes)
    (large / ONNX_FILE).write_bytes(other)  # of the same size
    assert_refused(large, ONNX_FILE, "fast", "another build")


def test_only_the_full_check_sees_a_byte_between_the_blocks(large: Path) -> None:
    damage(large / ONNX_WEIGHTS_FILE, lambda data: data.__setitem__(6000, data[6000] ^ 1))
    open_engine(large, "onnxruntime")
    assert_refused(large, ONNX_WEIGHTS_FILE, "full")


def test_an_unknown_check_is_refused_with_the_choices(tiny_engine: TinyEngine) -> None:
    with pytest.raises(ConfigError, match="'none'; choose from: fast, full"):
        open_engine(tiny_engine.engine, "onnxruntime", check="none")


# ------------------------------------------------------------------------------------- the backends


def test_the_fast_check_leaves_the_files_of_the_other_backend_alone(
    large: Path, trt: FakeTensorRT
) -> None:
    damage(large / PLAN_FILE, zeroed)
    open_engine(large, "onnxruntime")
    assert_refused(large, PLAN_FILE, "full")
    with pytest.raises(ManifestError, match=r"engine\.plan has other contents"):
        open_engine(large, "tensorrt")


def test_a_copy_without_the_plan_opens_on_onnx_runtime(large: Path, trt: FakeTensorRT) -> None:
    (large / PLAN_FILE).unlink()
    for check in ("fast", "full"):
        assert type(open_executor(large, check=check)).__name__ == "OnnxRuntimeEngine"


def answer(directory: Path, adapter: Path) -> tuple[int, ...]:
    """What an engine answers with an adapter, on whatever `open_engine` finds."""
    with open_engine(directory) as running:
        running.adapters.load("a", adapter)
        return running.generate([5, 6, 7], adapter="a").token_ids


def test_an_engine_with_a_plan_that_is_shipped_without_it_answers_on_a_cpu(
    engine: Path, tiny_engine: TinyEngine
) -> None:
    fields = json.loads((engine / MANIFEST_FILE).read_text())
    (engine / PLAN_FILE).write_bytes(b"a plan")
    fields["files"][PLAN_FILE] = dataclasses.asdict(file_record(engine / PLAN_FILE))
    fields |= {"flavour": "tensorrt-rtx", "lora_plugin": "plugin"}
    (engine / MANIFEST_FILE).write_text(json.dumps(fields))
    (engine / PLAN_FILE).unlink()
    assert read_manifest(engine).rank_multiple == 8  # the plan's, which pads; ONNX Runtime does not
    assert answer(engine, tiny_engine.adapter) == answer(tiny_engine.engine, tiny_engine.adapter)


def test_a_copy_without_the_onnx_file_opens_on_tensorrt(large: Path, trt: FakeTensorRT) -> None:
    for name in (ONNX_FILE, ONNX_WEIGHTS_FILE):
        (large / name).unlink()
    for check in ("fast", "full"):
        assert type(open_executor(large, check=check)).__name__ == "TensorRTEngine"
    assert_refused(large, ONNX_FILE, "fast", "it is missing")


@pytest.mark.parametrize("lost", [[ONNX_WEIGHTS_FILE], [ONNX_FILE], [PLAN_FILE, ONNX_FILE]])
def test_a_copy_without_half_a_backend_is_incomplete(
    large: Path, lost: list[str], trt: FakeTensorRT
) -> None:
    for name in lost:
        (large / name).unlink()
    with pytest.raises(ManifestError, match=r"is missing.*incomplete"):
        open_engine(large)


# -------------------------------------------------------------------------------------- the sample


def by_hand(data: bytes) -> str:
    """The sample as the documentation says it."""
    starts = [i * (len(data) - 4096) // 383 for i in range(384)]
    return hashlib.sha256(b"".join(data[start : start + 4096] for start in starts)).hexdigest()


def test_the_sample_is_as_documented(tmp_path: Path) -> None:
    for size in (384 * 4096 + 1, LARGE):
        data = np.random.default_rng(size).bytes(size)
        (tmp_path / "file").write_bytes(data)
        assert sampled_sha256(tmp_path / "file") == by_hand(data)
    for size in (0, 10, 384 * 4096):
        (tmp_path / "file").write_bytes(data[:size])
        assert sampled_sha256(tmp_path / "file") == hashlib.sha256(data[:size]).hexdigest()


def test_a_stretch_as_long_as_promised_always_changes_the_sample(tmp_path: Path) -> None:
    file, rng, size = tmp_path / "file", np.random.default_rng(0), LARGE
    whole = rng.integers(1, 256, size, np.uint8).tobytes()
    file.write_bytes(whole)
    before, length = sampled_sha256(file), size // 383
    for start in [0, size - length, *rng.integers(0, size - length, 20).tolist()]:
        file.write_bytes(whole[:start] + bytes(length) + whole[start + length :])
        assert sampled_sha256(file) != before, start


# --------------------------------------------------------------------------------- all of the files


def compared(directory: Path) -> tuple[dict[str, str], tuple[str, ...], tuple[str, ...]]:
    found = compare_files(directory, read_manifest(directory))
    return dict(found.faults), found.left_out, found.unlisted


def test_what_the_manifest_does_not_know_is_listed_and_no_fault(large: Path) -> None:
    (large / "notes.txt").write_text("mine")
    (large / "runtime.cache").write_bytes(b"ours")
    assert compared(large) == ({}, (), ("notes.txt",))


def test_a_backend_that_was_left_out_is_no_fault(large: Path) -> None:
    (large / PLAN_FILE).unlink()
    assert compared(large) == ({}, (PLAN_FILE,), ())


@pytest.mark.parametrize("check", ["fast", "full"])
def test_a_file_that_cannot_be_read_is_refused_by_name(
    large: Path, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest: Manifest = read_manifest(large)

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ManifestError, match=r"/large/.* cannot be read: Permission denied"):
        check_files(large, manifest, check, "onnxruntime")
