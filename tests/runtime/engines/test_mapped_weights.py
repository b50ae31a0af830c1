"""Weights of an open engine, replaced, overwritten or cut short: the same answer, or an error."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TinyEngine

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime import SamplingParams, open_engine
from trt_lora.runtime.manifest import ONNX_WEIGHTS_FILE

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def directory(tiny_engine: TinyEngine, tmp_path: Path) -> Path:
    """A copy of the tiny engine."""
    return shutil.copytree(tiny_engine.engine, tmp_path / "engine")


def overwritten(file: Path) -> None:
    with file.open("r+b") as writing:
        writing.write(b"\x3f" * 64)


def cut_short(file: Path) -> None:
    file.write_bytes(b"")


def appended(file: Path) -> None:
    with file.open("ab") as writing:
        writing.write(b"x")


def unlinked(file: Path) -> None:
    file.unlink()


def replaced(file: Path) -> None:
    (other := file.with_name("other")).write_bytes(bytes(file.stat().st_size))
    other.rename(file)


@pytest.mark.parametrize("change", [unlinked, replaced])
def test_another_file_of_the_name_changes_no_answer(
    directory: Path, change: Callable[[Path], None]
) -> None:
    with open_engine(directory, "onnxruntime") as engine:
        before = engine.generate([[5, 6, 7]], sampling=GREEDY)
        change(directory / ONNX_WEIGHTS_FILE)
        assert engine.generate([[5, 6, 7]], sampling=GREEDY) == before


@pytest.mark.parametrize("change", [overwritten, cut_short, appended])
def test_a_written_one_is_an_error_and_no_other_answer(
    directory: Path, change: Callable[[Path], None]
) -> None:
    with open_engine(directory, "onnxruntime") as engine:
        engine.generate([[5, 6, 7]], sampling=GREEDY)
        change(directory / ONNX_WEIGHTS_FILE)
        for _ in range(2):
            with pytest.raises(BackendError, match=r"model\.onnx\.data was written to while"):
                engine.generate([[5, 6, 7]], sampling=GREEDY)


def test_nothing_stays_open_after_an_engine(directory: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with open_engine(directory, "onnxruntime") as engine:
            engine.generate([[5, 6, 7]], sampling=GREEDY)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1  # of a pool of threads
