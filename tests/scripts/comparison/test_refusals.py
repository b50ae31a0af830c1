"""What `trt-lora compare` refuses, with one message and nothing left behind."""

import importlib.metadata
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.compare_command import compare
from support.fakes.planted_faults import copy_of
from support.fakes.tiny_engine import engine_directory
from support.models.tiny_models import save_adapter, save_model

from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE, read_manifest
from trt_lora.scripts.comparison.comparison import Comparison
from trt_lora.scripts.terminal.console import INTERRUPTED


def refused(
    capsys: pytest.CaptureFixture[str], engine: Path, *options: str | Path, keep: Path | None = None
) -> str:
    """Check that it exits with 2, prints one message and leaves nothing behind; return it."""
    folder = keep or engine.parent / "refused"
    assert compare(engine, *options, "--keep", folder) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert keep is not None or not folder.exists()
    return printed.err.removeprefix("error: ").strip()


def test_an_adapter_that_does_not_fit_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tiny_engine.engine
    assert "adapters/none" in refused(capsys, engine, "--adapter", "a=adapters/none")
    wide = save_model("Llama", tmp_path / "wide", hidden_size=64)
    other = save_adapter(wide, tmp_path / "other", r=4, target_modules=["q_proj"])
    message = refused(capsys, engine, "--adapter", f"a={other}")
    assert "was trained on another base model" in message
    assert "expected NAME=PATH" in refused(capsys, engine, "--adapter", str(other))
    for name in ("base", "a/b", ""):
        assert refused(capsys, engine, "--adapter", f"{name}={tiny_engine.adapter}")
    twice = ("--adapter", f"a={tiny_engine.adapter}") * 2
    assert "a name of its own" in refused(capsys, engine, *twice)


@pytest.mark.parametrize("tolerance", ["inf", "nan", "-1"])
def test_a_tolerance_that_proves_nothing_is_refused(
    tiny_engine: TinyEngine, capsys: pytest.CaptureFixture[str], tolerance: str
) -> None:
    message = refused(capsys, tiny_engine.engine, f"--tolerance={tolerance}")
    assert message.endswith("expected a finite number from 0")


def test_an_engine_is_not_compared_with_itself(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tiny_engine.engine)
    message = refused(capsys, tiny_engine.engine, "--against", tmp_path / "link")
    assert "is the engine itself, which always agrees" in message


def test_a_prompt_that_does_not_fit_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, tiny_engine.engine, "--prompt", "Name a fruit.")
    assert "has no tokenizer.json" in message
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    engine = copy_of(tiny_engine.engine, tmp_path / "engine")
    tokenizer = Tokenizer(WordLevel({"a": 3, "?": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(engine / "tokenizer.json"))
    message = refused(capsys, engine, "--prompt", "a " * 33)
    assert message.startswith("input_ids would be [1, 33] in prefill; this engine takes")


def test_what_it_cannot_be_compared_with_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tiny_engine.engine
    assert "merged, native; " in refused(capsys, engine, "--against", "merge")
    assert "`trt-lora verify` compares with" in refused(capsys, engine, "--against", "peft")

    other = copy_of(engine, tmp_path / "other")
    manifest = read_manifest(other)
    base = replace(manifest.base_model, name="another", fingerprint="0")
    (other / MANIFEST_FILE).write_text(replace(manifest, base_model=base).to_json())
    assert "is built from another" in refused(capsys, engine, "--against", other)
    (other / MANIFEST_FILE).write_text(replace(manifest, dtype="bfloat16").to_json())
    assert "is a bfloat16 engine" in refused(capsys, engine, "--against", other)


def test_an_engine_that_cannot_be_compared_is_refused(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain").mkdir()
    plain = engine_without_lora(tiny_engine.engine, tmp_path / "plain")
    assert "has no LoRA inputs" in refused(capsys, plain)
    assert "is not an engine directory" in refused(capsys, tiny_engine.model)
    of_a_gpu = engine_directory(tmp_path / "of_a_gpu")
    for name in (ONNX_FILE, ONNX_WEIGHTS_FILE):
        (of_a_gpu / name).unlink()
    assert "has no model.onnx" in refused(capsys, of_a_gpu)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    message = refused(capsys, tiny_engine.engine, keep=tmp_path / "full")
    assert "is not empty" in message


def test_polygraphy_that_is_missing_or_too_old_is_refused(
    tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.49.26")
    message = refused(capsys, tiny_engine.engine)
    assert message.startswith("polygraphy is 0.49.26, compare needs 0.53.6 or later; pip install")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = refused(capsys, tiny_engine.engine)
    assert message.startswith("compare needs polygraphy, which is not installed; pip install")


@pytest.mark.slow
def test_a_command_that_fails_is_named_with_its_reason(
    tiny_engine: TinyEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = copy_of(tiny_engine.engine, tmp_path / "broken")
    (broken / ONNX_FILE).write_bytes(b"\xff" * 100)
    keep = tmp_path / "kept"
    assert compare(broken, "--against", tiny_engine.engine, "--keep", keep) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: ")
    assert str(keep / "logs" / "base.txt") in message
    assert 'comparison.onnx_variants engine "$ENGINE" --output' in message


def test_an_interrupted_comparison_says_where_its_files_are(
    tiny_engine: TinyEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Comparison, "run", interrupted)
    kept = tmp_path / "kept"
    assert compare(tiny_engine.engine, "--keep", kept) == INTERRUPTED
    said = f"error: interrupted; what was made so far lies in {kept}\n"
    assert capsys.readouterr().err == said
    assert any(kept.iterdir())
