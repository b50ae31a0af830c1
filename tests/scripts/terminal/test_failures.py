"""How a command fails: one line on stderr, with --json an object on stdout too, and Ctrl-C."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import streams

from trt_lora.plugins.atomic_files import publish_file
from trt_lora.plugins.errors import ManifestError
from trt_lora.scripts import build_engine, switch_adapters
from trt_lora.scripts.terminal.console import INTERRUPTED, run
from trt_lora.scripts.trt_lora_command import _COMMANDS

# What each command is given beside the path of something that does not exist.
MORE = {
    "generate": ["w5"],
    "convert-adapter": ["out", "--format", "peft"],
    "merge": ["--model", "m", "--adapter", "a"],
    "verify": ["--model", "m", "--adapter", "a"],
    "report": ["--html", "page.html"],
}


def error_of(printed: str) -> dict[str, Any]:
    """The one object that is printed."""
    found = json.loads(printed)
    assert found.keys() == {"error"}
    assert found["error"].keys() == {"type", "message"}
    error: dict[str, Any] = found["error"]
    return error


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts: who starts the tests in the background of a shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_with_json_says_there_why_it_fails(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [command, "nowhere", *MORE.get(command, []), "--json"]
    out, err = streams(capsys, *words, expected=2)
    error = error_of(out)
    assert error["type"].endswith("Error")
    assert err == f"error: {error['message']}\n"
    silent, same = streams(capsys, *words[:-1], expected=2)
    assert (silent, same) == ("", err)


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_word_that_no_parser_knows_is_json_too_and_one_line_with_the_help_that_lists_all(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, "e", *MORE.get(command, []), "--zzz"]
    out, err = streams(capsys, *words, "--json", expected=2)
    said = "unrecognized arguments: --zzz"
    assert error_of(out) == {"type": "ConfigError", "message": said}
    assert err == f"error: {said}\nsee: trt-lora {command} --help\n"
    assert streams(capsys, *words, expected=2) == ("", err)


def test_a_word_that_comes_too_early_or_not_at_all_names_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, err = streams(capsys, expected=2)
    assert err == "error: the following arguments are required: COMMAND\nsee: trt-lora --help\n"
    _, err = streams(capsys, "check", expected=2)
    assert (
        err == "error: the following arguments are required: ENGINE\nsee: trt-lora check --help\n"
    )


def test_what_stands_behind_a_double_dash_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert streams(capsys, "generate", "nowhere", "--", "--json", expected=2)[0] == ""


@pytest.mark.parametrize("program", [build_engine.main, switch_adapters.main])
def test_the_other_programs_do_so_as_well(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--zzz", "--json"])
    with pytest.raises(SystemExit, match="2"):
        program()
    printed = capsys.readouterr()
    message = error_of(printed.out)["message"]
    assert printed.err.startswith(f"error: {message}\nsee: ")
    assert printed.err.endswith(" --help\n")


def failing(error: BaseException, words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit status, stdout and stderr of a command that raises."""

    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as exited:
        run(command, words)
    printed = capsys.readouterr()
    return exited.value.code, printed.out, printed.err


def test_the_json_of_an_error_is_one_line_with_its_class(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = failing(ManifestError("it is\nbroken"), ["--json"], capsys)
    assert (code, err) == (2, "error: it is\nbroken\n")
    assert out == '{"error": {"type": "ManifestError", "message": "it is\\nbroken"}}\n'
    code, out, _ = failing(FileNotFoundError(2, "No such file", "e"), ["--json"], capsys)
    message = "No such file: e; check the path, and run it again"
    assert (code, error_of(out)) == (2, {"type": "FileNotFoundError", "message": message})


def test_an_interrupted_command_says_that_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(KeyboardInterrupt(), [], capsys) == (INTERRUPTED, "", "error: interrupted\n")
    code, out, _ = failing(KeyboardInterrupt(), ["--json"], capsys)
    assert code == INTERRUPTED
    assert error_of(out) == {"type": "KeyboardInterrupt", "message": "interrupted"}


def test_an_interrupted_command_that_writes_a_file_says_that_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        with publish_file(tmp_path / "a") as work:
            work.touch()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(SystemExit) as exited:
        run(write, [])
    assert exited.value.code == INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted; no file was written\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [ImportError, RuntimeError])
def test_an_interrupt_that_a_library_takes_for_another_error_is_still_one(
    other: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def import_in_two_steps() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as error:
            raise other("a part could not be imported") from error

    with pytest.raises(SystemExit) as exited:
        run(import_in_two_steps, [])
    assert exited.value.code == INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted\n"


class InterruptedFinalizer:
    """What Python calls while it forgets an object, and whose errors it prints and forgets."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_that_a_finalizer_swallows_comes_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> None:
        InterruptedFinalizer()
        threading.Event().wait(60)

    with pytest.raises(SystemExit) as exited:
        run(work, [])
    assert exited.value.code == INTERRUPTED
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_defect_shows_its_traceback_and_the_handler_of_before_is_back() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        run(lambda: print(1 // 0), [])
    assert signal.getsignal(signal.SIGINT) is handler
