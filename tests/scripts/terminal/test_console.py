"""What every command does at its edges: a reader that is gone, paths that cannot be used."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.spoken_engine import spoken_engine

from trt_lora.scripts import build_engine
from trt_lora.scripts.terminal.console import BROKEN_PIPE, TERMINATED, run
from trt_lora.scripts.trt_lora_command import main

COMMANDS = {"trt-lora": "trt_lora_command", "build-engine": "build_engine"}


Word = str | bytes | Path


def command(name: str, *argv: Word) -> list[Word]:
    """A command line for a process of its own."""
    return [sys.executable, "-m", f"trt_lora.scripts.{COMMANDS[name]}", *argv]


def unread(name: str, *argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command whose output goes into a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        return subprocess.run(
            command(name, *argv), stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )


def test_a_reader_that_is_gone_ends_a_command_quietly(tiny_engine: TinyEngine) -> None:
    done = unread("trt-lora", "inspect", tiny_engine.engine)
    assert (done.returncode, done.stderr) == (BROKEN_PIPE, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_is_gone_ends_help_quietly(name: str) -> None:
    done = unread(name, "--help")
    assert done.returncode in (0, BROKEN_PIPE)  # argparse itself ignores some closed pipes
    assert done.stderr == ""


@pytest.mark.slow
def test_a_dry_run_whose_reader_is_gone_ends_quietly(
    tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    options = ["--lora-target-modules", "q_proj", "--dry-run"]
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as exited:
            build_engine.main(["--model", str(tiny_engine.model), *options])
    assert (exited.value.code, capsys.readouterr().err) == (BROKEN_PIPE, "")


# Runs a command of the test's own, which ends its own process by SIGTERM, in three ways.
ENDED = """
import os, signal, sys
from pathlib import Path
from trt_lora.plugins.atomic_files import publish_directory
from trt_lora.scripts.terminal.console import run

def end():
    os.kill(os.getpid(), signal.SIGTERM)

def write():
    with publish_directory(Path(sys.argv[2])) as work:
        (work / "half").write_text("half")
        end()
        (work / "other half").write_text("half")

def trace():  # as a tracer in C++ does
    try:
        end()
    except BaseException as error:
        raise RuntimeError("cannot be traced") from error

def handled():
    end()
    print("handled", file=sys.stderr)

if sys.argv[1] == "handled":
    signal.signal(signal.SIGTERM, lambda *_: None)
run({"write": write, "trace": trace, "handled": handled}[sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("what", "status", "said"),
    [
        ("write", TERMINATED, "error: terminated by SIGTERM\n"),
        ("trace", TERMINATED, "error: terminated by SIGTERM\n"),
        ("handled", 0, "handled\n"),
    ],
    ids=["a command that writes", "a library that takes it for an error", "a handler of others"],
)
def test_sigterm_ends_a_command_with_a_word_and_removes_what_it_was_writing(
    what: str, status: int, said: str, tmp_path: Path
) -> None:
    words: list[Word] = [sys.executable, "-c", ENDED, what, tmp_path / "out"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, said)
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_no_text_are_printed_with_escapes(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    done = subprocess.run(
        command("trt-lora", "convert-adapter", tiny_engine.adapter, name, "--format", "peft"),
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/caf\\udce9: 8 tensors from")
    assert os.path.isfile(name + b"/adapter_model.safetensors")


def test_an_error_goes_nowhere_where_stderr_is_closed(tmp_path: Path) -> None:
    words = " ".join(map(str, command("trt-lora", "inspect", tmp_path / "no")))
    done = subprocess.run(f"{words} 2>&-", shell=True, stdout=subprocess.PIPE, check=False)
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_conversation_needs_no_stderr(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    engine = spoken_engine(tiny_engine.engine, tmp_path / "engine")
    words = " ".join(map(str, command("trt-lora", "chat", engine, "--json")))
    done = subprocess.run(
        f"echo /adapters | {words} 2>&-", shell=True, stdout=subprocess.PIPE, check=False
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"adapters": [""], "active": ""})


@pytest.mark.parametrize("what", ["engine", "adapter", "output", "model"])
def test_an_over_long_path_is_refused_in_one_line(
    what: str,
    tiny_engine: TinyEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    long, engine, adapter = str(tmp_path / ("x" * 300)), tiny_engine.engine, tiny_engine.adapter
    convert = ["convert-adapter", str(adapter), long, "--format", "peft"]
    build = ["--model", long, "--lora-target-modules", "q_proj", "--flavour", "none"]
    with pytest.raises(SystemExit) as raised:
        {
            "engine": lambda: main(["inspect", long]),
            "adapter": lambda: main(["inspect", str(engine), "--adapter", long]),
            "output": lambda: main(convert),
            "model": lambda: build_engine.main([*build, "--output", str(tmp_path / "e")]),
        }[what]()
    (*_, line) = capsys.readouterr().err.splitlines()
    assert raised.value.code == 2
    assert line.startswith("error: ")
    assert "name too long" in line
    assert "x" * 100 in line


@pytest.mark.parametrize(
    ("number", "next_step"), [(errno.EACCES, "check the path"), (errno.ENOSPC, "make room")]
)
def test_what_the_system_refuses_is_said_in_one_line_with_the_next_step(
    number: int, next_step: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number), "engines/a")

    with pytest.raises(SystemExit) as raised:
        run(fail)
    assert raised.value.code == 2
    message = f"error: {os.strerror(number)}: engines/a; {next_step}, and run it again\n"
    assert capsys.readouterr().err == message


def test_a_closed_standard_output_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as exited:
        run(lambda: pytest.fail("the command was run"))
    assert exited.value.code == 2
    assert "standard output is closed; open it" in capsys.readouterr().err
