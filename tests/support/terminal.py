"""A command in a real terminal, and what a person sees of it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
from support.eventually import eventually

SECONDS = 60  # to wait for what is expected; nothing is measured


@contextmanager
def terminal(command: str, *arguments: str | Path) -> Iterator["pexpect.spawn[str]"]:
    """Start a command of this environment in a terminal of 100 columns; end it in any case."""
    program = str(Path(sys.executable).with_name(command))
    child = pexpect.spawn(
        program,
        [str(argument) for argument in arguments],
        env=os.environ | {"TERM": "dumb", "PYTHONUNBUFFERED": "1"},
        dimensions=(24, 100),
        encoding="utf-8",
        timeout=SECONDS,
    )
    try:
        yield child
    finally:
        child.close(force=True)


def shown(child: "pexpect.spawn[str]", until: str) -> str:
    """Wait for a text, and return what was shown before it, the line that was typed included."""
    child.expect_exact(until)
    before: str = child.before or ""
    return before.replace("\r\n", "\n")


def interrupt_at_prompt(child: "pexpect.spawn[str]") -> None:
    """Press Ctrl-C once the command sleeps.

    Where it comes while readline draws what was typed, Python sees it at the next key alone.
    """
    status = Path(f"/proc/{child.pid}/stat")
    assert not status.exists() or eventually(
        lambda: status.read_text().rpartition(") ")[2][0] == "S"
    )
    child.sendintr()


def ended(child: "pexpect.spawn[str]") -> tuple[str, int]:
    """Wait for the end, and return what was shown until then, and the exit status."""
    child.expect(pexpect.EOF)
    rest: str = child.before or ""
    child.close()
    assert child.exitstatus is not None, f"ended by signal {child.signalstatus}"
    return rest.replace("\r\n", "\n"), child.exitstatus
