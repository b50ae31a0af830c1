"""The installed commands: Ctrl-C ends them in one line, while modules are imported too."""

import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from support.doc_blocks import ROOT

from trt_lora.scripts import entry_points
from trt_lora.scripts.terminal.console import INTERRUPTED

# How they are begun, and a module of ours that is imported early or late.
BEGUN = {
    "trt-lora": "from trt_lora.scripts.entry_points import trt_lora; trt_lora()",
    "build-engine": "from trt_lora.scripts.entry_points import build_engine; build_engine()",
    "python -m trt_lora": "import runpy; runpy.run_module('trt_lora', run_name='__main__')",
}
EARLY, LATE = "trt_lora.plugins.errors", "trt_lora.runtime.manifest"


def begun(program: str, *words: str | Path) -> "subprocess.Popen[str]":
    """Start a command that says on stderr what it imports, and waits for its standard input."""
    command = [sys.executable, "-X", "importtime", "-c", BEGUN[program], *map(str, words)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in a shell's background has Ctrl-C switched off, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for_import(process: "subprocess.Popen[str]", module: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith(f" {module}"):
            return
    pytest.fail(f"{module} was not imported")


def assert_interrupted(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert (process.returncode, out, said) == (INTERRUPTED, "", ["error: interrupted"])


@pytest.mark.parametrize("module", [EARLY, LATE])
@pytest.mark.parametrize("program", BEGUN)
def test_ctrl_c_while_modules_are_imported_ends_a_command_in_one_line(
    program: str, module: str, tmp_path: Path
) -> None:
    words = ["--model" if program == "build-engine" else "chat", tmp_path]
    with begun(program, *words) as process:
        wait_for_import(process, module)
        assert_interrupted(process)


@pytest.mark.parametrize("delay", [0, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_ctrl_c_at_any_time_of_the_first_second_does_so_too(delay: float) -> None:
    with begun("trt-lora", "generate", "engine", "-") as process:
        wait_for_import(process, EARLY)
        time.sleep(delay)  # nothing is measured: the command waits for its standard input
        assert_interrupted(process)


def test_a_command_that_is_to_ignore_ctrl_c_does_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does in the background
    try:
        monkeypatch.setattr(sys, "argv", ["trt-lora", "--version"])
        with pytest.raises(SystemExit, match="0"):
            entry_points.trt_lora()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_installed_commands_begin_there() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert declared == {
        name: f"trt_lora.scripts.entry_points:{name.replace('-', '_')}"
        for name in ("build-engine", "trt-lora")
    }
