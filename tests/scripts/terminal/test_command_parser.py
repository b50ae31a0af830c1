"""Misspelled words get a suggestion, a program says its version, shells get a completion script."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import trt_lora

import trt_lora as package
from trt_lora.scripts import build_engine, trt_lora_command
from trt_lora.scripts.terminal.command_parser import SHELLS

HEAVY = {
    *("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "rich", "peft"),
    *("tensorrt", "tensorrt_rtx", "cuda", "polygraphy", "tokenizers", "jinja2", "shtab"),
}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generat", "e", "hi"], "invalid choice: 'generat'; choose from: generate, chat, "),
        (["generat", "e", "hi"], "; did you mean 'generate'?"),
        (["chat", "e", "--bakend", "auto"], ": --bakend auto; did you mean '--backend'?"),
        (["chat", "e", "--adaptor=a=b"], ": --adaptor=a=b; did you mean '--adapter'?"),
        (["chat", "e", "--backend", "tensortt"], "onnxruntime; did you mean 'tensorrt'?"),
        (["check", "e", "--jsn"], "error: unrecognized arguments: --jsn; did you"),
    ],
)
def test_a_misspelled_word_gets_the_nearest_choice(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in trt_lora(capsys, *words, expected=2)


@pytest.mark.parametrize("words", [["check", ""], ["bench", "e", "--export", ""]])
def test_an_empty_path_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "the path is empty; is a shell variable not set?" in trt_lora(capsys, *words, expected=2)


def test_a_word_like_no_choice_gets_none(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["xyz"], ["check", "e", "--zzz"], ["check", "e", "surplus"]):
        assert "did you mean" not in trt_lora(capsys, *words, expected=2)


def test_the_value_of_an_option_of_build_engine_gets_the_nearest_choice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_engine.main(["--model", "m", "--dtype", "float61"])
    printed = capsys.readouterr().err
    assert "argument --dtype: invalid choice: 'float61'; choose from: " in printed
    assert "; did you mean 'float16'?\n" in printed


def test_an_engine_is_suggested_that_lies_beside_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "manifest.json").write_text("{}")
    printed = trt_lora(capsys, "check", tmp_path / "smolm2", expected=2)
    assert printed.endswith("; did you mean 'smollm2'?\n")


@pytest.mark.parametrize("program", ["trt-lora", "build-engine"])
def test_a_program_says_its_version(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = trt_lora_command.main if program == "trt-lora" else build_engine.main
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"{program} {package.__version__}\n"


def test_an_unknown_name_of_the_package_is_refused() -> None:
    with pytest.raises(AttributeError, match="'trt_lora' has no attribute 'flavour'"):
        _ = package.flavour


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_every_subcommand_and_option(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = trt_lora(capsys, "--print-completion", shell)
    assert all(word in script for word in ("convert-adapter", "doctor", "backend"))
    with pytest.raises(SystemExit, match="0"):
        build_engine.main(["--print-completion", shell])
    assert "lora-target-modules" in capsys.readouterr().out


def test_without_shtab_its_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    printed = trt_lora(capsys, "--print-completion", "bash", expected=2)
    assert printed.endswith("pip install 'trt-lora[completion]'\n")


TRY = """
complete() { :; }
source "$1"
try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_trt_lora; echo "${COMPREPLY[@]}"; }
cd "$2"
try trt-lora che
try trt-lora check eng
try trt-lora chat x --backend on
try trt-lora inspect x --adapter ada
"""


def test_bash_completes_subcommands_choices_directories_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, folder = tmp_path / "completion.bash", tmp_path / "here"
    script.write_text(trt_lora(capsys, "--print-completion", "bash"))
    (folder / "engine").mkdir(parents=True)
    (folder / "engine.txt").touch()  # is no directory
    (folder / "adapter.safetensors").touch()
    done = subprocess.run(
        ["bash", "-c", TRY, "bash", script, folder], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["check", "engine", "onnxruntime", "adapter.safetensors"]


def test_help_as_a_module_imports_nothing_heavy() -> None:
    program = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['--help']\n"
        "try:\n    runpy.run_module('trt_lora', run_name='__main__', alter_sys=True)\n"
        "except SystemExit:\n    print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: trt-lora ")
    assert not HEAVY & {name.partition(".")[0] for name in done.stderr.split()}
