"""The command `trt-lora` in this process, and a stream that is a terminal."""

import io
from pathlib import Path

import pytest

from trt_lora.scripts.trt_lora_command import main


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def trt_lora(capsys: pytest.CaptureFixture[str], *arguments: str | Path, expected: int = 0) -> str:
    """Run it, check the exit status, and return what it printed."""
    out, err = streams(capsys, *arguments, expected=expected)
    return out or err


def streams(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path, expected: int = 0
) -> tuple[str, str]:
    """Run it, check the exit status, and return what it printed on stdout and on stderr."""
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as exited:
        code = int(exited.code or 0)
    printed = capsys.readouterr()
    assert code == expected, printed.err
    return printed.out, printed.err
