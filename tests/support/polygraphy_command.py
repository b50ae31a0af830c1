"""The command `polygraphy`, as a user runs it, on the engines of tests."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.forked_commands import run_forked
from support.processes import without_torch

# polygraphy asks Python 3.11 for extensions in an old way, and closes no script.
POLYGRAPHY_WARNINGS = [
    pytest.mark.filterwarnings("ignore:SelectableGroups dict:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    text: str  # what it printed, both streams

    def lines(self, word: str) -> list[str]:
        """Return the lines that contain a word."""
        return [line for line in self.text.splitlines() if word in line]


def polygraphy(*arguments: str | Path, rtx: bool = False, expected: int = 0) -> Done:
    """Run `polygraphy ARGUMENTS` in a process of its own and check its exit status.

    `rtx` sets what polygraphy itself asks for to use TensorRT-RTX.
    """
    program = Path(sys.executable).with_name("polygraphy")
    return script(program, *arguments, rtx=rtx, expected=expected)


def script(path: Path, *arguments: str | Path, rtx: bool = False, expected: int = 0) -> Done:
    """Run a Python script likewise, on a machine without a GPU, and without torch."""
    flavour = {"POLYGRAPHY_USE_TENSORRT_RTX": "1"} if rtx else {}
    run = subprocess.run if rtx else run_forked  # polygraphy asks when it is imported
    done = run(
        [sys.executable, path, *arguments],
        env=os.environ | without_torch() | flavour | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert done.returncode == expected, plain[-3000:]
    return Done(done.returncode, plain)
