"""Prompts of a command: its arguments, standard input, or a file with one a line."""

import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from trt_lora.plugins.errors import ConfigError
from trt_lora.scripts.terminal.answering_options import read_text

STDIN = "-"  # as an argument


def prompts_of(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts that are arguments, `-` among them, and behind them those of a file.

    Raises:
        ConfigError: there is none, or what they are read from cannot be read.
    """
    if arguments.count(STDIN) > 1:
        raise ConfigError(f"{STDIN} is there twice, and standard input is one prompt; pass it once")
    lines = [] if file is None else prompt_lines(file)
    if not arguments and not lines:
        raise ConfigError(
            f"nothing to answer; pass a PROMPT, {STDIN} to read it from standard input, or "
            "--prompts FILE"
        )
    return [*_read(arguments), *lines]


def _read(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        is_stdin = argument == STDIN
        yield standard_input("a prompt").read().removesuffix("\n") if is_stdin else argument


def prompt_lines(path: Path) -> list[str]:
    """Return the lines of a file that are not blank.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    prompts = [line for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; write one a line")
    return prompts


def standard_input(what: str) -> TextIO:
    """Return standard input, which may hold bytes that are no text: the tokenizer says so.

    Raises:
        ConfigError: it is closed; the message names what was to be read.
    """
    if sys.stdin is None:
        raise ConfigError(f"standard input is closed, and {what} is read from it; open it")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin
