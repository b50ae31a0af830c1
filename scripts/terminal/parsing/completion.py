"""`--print-completion SHELL`: print a completion script for a shell, made by shtab."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_lora.plugins.extras import extra

SHELLS = ("bash", "zsh", "tcsh")
_DIRECTORIES = ("DIR", "ENGINE", "FOLDER")  # how usage calls what is a directory


class PrintCompletion(argparse.Action):
    """Prints the script and exits; options of type `Path` complete the names of files."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Print it.

        Raises:
            BackendError: shtab is not installed.
        """
        with extra("completion", "--print-completion"):
            import shtab
        for action in _all_actions(parser):
            if action.type is Path:
                kind = shtab.DIRECTORY if action.metavar in _DIRECTORIES else shtab.FILE
                action.complete = kind  # type: ignore[attr-defined]
        print(shtab.complete(parser, values))
        parser.exit()


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options and arguments of a parser and of its subcommands."""
    for action in parser._actions:  # argparse has no public list of them
        yield action
        if isinstance(action.choices, dict):
            for subparser in action.choices.values():
                yield from _all_actions(subparser)
