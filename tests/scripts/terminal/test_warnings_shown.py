"""Whoever types a command sees what is suspicious about an adapter: a line each, each once."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TinyEngine
from safetensors.numpy import load_file, save_file
from support.models.quick_build import shared_traces

from trt_lora.scripts import build_engine, switch_adapters, trt_lora_command
from trt_lora.scripts.polygraphy_extension import data_script as polygraphy_data
from trt_lora.scripts.terminal.console import warnings_shown

WEIGHTS = "adapter_model.safetensors"
LOST = "model.layers.1.self_attn.q_proj"
SMALL = ("--max-input-len", "32", "--max-seq-len", "64", "--dtype", "float32", "--flavour", "none")

Main = Callable[[list[str]], None]


@pytest.fixture
def suspicious(tiny_engine: TinyEngine, tmp_path: Path) -> Path:
    """Names another base, lacks a layer that it targets, has tensors that it does not target."""
    adapter = Path(shutil.copytree(tiny_engine.adapter, tmp_path / "suspicious"))
    tensors = load_file(adapter / WEIGHTS)
    save_file({n: tensor for n, tensor in tensors.items() if LOST not in n}, adapter / WEIGHTS)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": "some/base", "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return adapter


def shown(capsys: pytest.CaptureFixture[str], main: Main, *words: object, expected: int) -> str:
    """Run a command, check how it ends, and return what it printed on stderr."""
    code: object = 0
    try:
        main([str(word) for word in words])
    except SystemExit as exited:
        code = exited.code or 0
    printed = capsys.readouterr().err
    assert code == expected, printed
    return printed


def assert_warned(printed: str, adapter: Path) -> None:
    """Every warning is one line, and is there once."""
    lines = [line for line in printed.splitlines() if line.startswith("warning: ")]
    other, missing, ignored = lines
    assert f"warning: {adapter}: the adapter names 'some/base' as its base model" in other
    assert f"targets {LOST}, but its file has no tensors for them" in missing
    assert "4 of its tensors are ignored, as PEFT ignores them" in ignored


def test_switch_adapters_warns_of_every_adapter_once(
    tiny_engine: TinyEngine, suspicious: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = ("--adapter", f"a={suspicious}", "--adapter", f"b={suspicious}", "--prompt", "hi")
    engine = ("--engine", tiny_engine.engine)
    printed = shown(capsys, switch_adapters.main, *engine, *twice, expected=2)
    assert_warned(printed, suspicious)
    assert printed.splitlines()[-1].startswith("error: ")  # the engine has no tokenizer


@pytest.mark.parametrize("options", [("--full",), ("--json",), ()])
def test_inspect_warns_on_stderr_and_lists_what_is_ignored(
    tiny_engine: TinyEngine,
    suspicious: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    command = ("inspect", tiny_engine.engine, "--adapter", suspicious, *options)
    trt_lora_command.main([str(word) for word in command])
    printed = capsys.readouterr()
    assert_warned(printed.err, suspicious)
    if "--json" in options:
        report = json.loads(printed.out)
        assert len(report["ignored"]) == 4
        assert len(report["warnings"]) == 3
    else:
        listed = 4 if options else 2  # kinds of tensors, A and B
        assert printed.out.count("\nignored: base_model.model.model.layers.") == listed
        assert "the engine takes it; 2 tensors bound, 0 not, 4 ignored; 1 of 4" in printed.out


def test_convert_adapter_warns_with_an_engine_and_of_the_file_alone_without(
    tiny_engine: TinyEngine, suspicious: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, command = trt_lora_command.main, ("convert-adapter", suspicious)
    engine = ("--engine", tiny_engine.engine, "--format", "peft")
    assert_warned(shown(capsys, main, *command, tmp_path / "b", *engine, expected=0), suspicious)
    (line,) = shown(
        capsys, main, *command, tmp_path / "c", "--format", "peft", expected=0
    ).splitlines()
    assert line.startswith(f"warning: {suspicious}: 4 of its tensors are ignored")
    assert len(load_file(tmp_path / "c" / WEIGHTS)) == 2


def test_inputs_for_polygraphy_are_written_with_a_warning(
    tiny_engine: TinyEngine, suspicious: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (tiny_engine.engine, tmp_path / "inputs.json", "--adapter", suspicious)
    assert_warned(shown(capsys, polygraphy_data.main, *words, expected=0), suspicious)


@pytest.mark.slow
def test_verify_warns_and_fails_for_what_the_file_lacks(
    tiny_engine: TinyEngine, suspicious: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("verify", tiny_engine.engine, "--model", tiny_engine.model, "--adapter", suspicious)
    printed = shown(capsys, trt_lora_command.main, *words, expected=1)
    assert_warned(printed, suspicious)
    assert f"error: {LOST} is targeted, but has no tensors" in printed


@pytest.mark.slow
def test_build_engine_warns_of_the_adapters_that_it_builds_for(
    tiny_engine: TinyEngine, suspicious: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--model", tiny_engine.model, "--output", tmp_path / "e", "--lora-dir", suspicious)
    with shared_traces():
        printed = shown(capsys, build_engine.main, *where, *SMALL, expected=0)
    lines = [line for line in printed.splitlines() if "warning: " in line]
    assert (
        sorted(line.partition(": ")[2].partition(":")[0] for line in lines) == [str(suspicious)] * 3
    )


def test_a_warning_is_one_line_and_other_logs_are_not_shown() -> None:
    found: list[str] = []
    log = logging.getLogger("trt_lora.runtime.any")
    with warnings_shown(found.append):
        for message in ("a\nb", "c", "c"):
            log.warning(message)
        log.info("not a warning")
        logging.getLogger("other").warning("not of this package")
    log.warning("too late")
    assert found == ["a b", "c"]
