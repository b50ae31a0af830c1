"""Commands on an engine for many adapters: they work, or refuse it by name."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.commands import trt_lora
from support.models.quick_build import shared_traces
from support.models.tiny_models import save_adapter

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import read_manifest
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import save_adapter as save_as
from trt_lora.scripts.build_engine import main as build_engine

OPTIONS = ["--dtype", "float32", "--flavour", "none", "--max-lora-rank", "8", "--max-seq-len", "64"]


@dataclass(frozen=True)
class Made:
    model: Path
    engine: Path
    adapter: Path


@pytest.fixture(scope="module")
def made(tiny_engine: TinyEngine, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """An engine with four slots, by the command, and an adapter that it takes."""
    folder = tmp_path_factory.mktemp("slots")
    where = ["--model", str(tiny_engine.model), "--output", str(folder / "engine")]
    with shared_traces():
        build_engine([*where, *OPTIONS, "--lora-target-modules", "all-linear", "--max-loras", "4"])
    adapter = save_adapter(tiny_engine.model, folder / "a", r=4)
    return Made(tiny_engine.model, folder / "engine", adapter)


@pytest.mark.slow
def test_verify_compares_it_with_peft(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    options: list[str | Path] = ["--model", made.model, "--adapter", made.adapter]
    printed = trt_lora(capsys, "verify", made.engine, *options, "--max-tokens", "4")
    assert "the engine computes what PEFT does" in printed


def test_inspect_says_how_many_adapters_and_how_much_memory(
    made: Made, tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "4 in a batch, in stacks of 0.1 MB" in trt_lora(capsys, "inspect", made.engine)
    assert "one at a time, for all rows" in trt_lora(capsys, "inspect", tiny_engine.engine)


def test_inspect_shows_an_adapter(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    printed = trt_lora(capsys, "inspect", made.engine, "--adapter", made.adapter)
    assert "the engine takes it; 28 tensors bound" in printed


def test_compare_refuses_it(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    printed = trt_lora(capsys, "compare", made.engine, "--adapter", f"a={made.adapter}", expected=2)
    assert "takes 4 adapters in a batch, and its inputs are made for one" in printed


def test_an_onnx_adapter_is_not_written_for_it(made: Made, tmp_path: Path) -> None:
    adapter, manifest = load_adapter(made.adapter), read_manifest(made.engine)
    with pytest.raises(ConfigError, match=r"an engine with 4 slots takes stacks of adapters"):
        save_as(adapter, tmp_path / "a.onnx_adapter", "onnxruntime", manifest=manifest)
    assert list(tmp_path.iterdir()) == []
