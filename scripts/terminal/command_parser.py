"""Argument parser of all commands: suggestions for misspelled words, `--version`, completion."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import trt_lora
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.plugins.messages import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """A parser that says what a misspelled subcommand, option or choice may have meant.

    It refuses empty paths, which would be the current folder.

    The parsers of its subcommands are of this class, too.
    """

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # three overloads
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse, and refuse what is unknown here, with the help of the subcommand it is for."""
        words = None if args is None else list(args)
        known, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown)}")
        return known, unknown

    def _suggestion(self, unknown: Sequence[str]) -> str:
        name = unknown[0].partition("=")[0]
        return did_you_mean(name, self._option_string_actions) if name[:1] == "-" else ""

    def error(self, message: str) -> NoReturn:
        """Refuse a command line, and name the help that lists what it may hold.

        Raises:
            ConfigError: always.
        """
        error = ConfigError(message)
        error.add_note(f"see: {self.prog} --help")
        raise error

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type is Path and not arg_string:
            raise argparse.ArgumentError(action, "the path is empty; is a shell variable not set?")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = did_you_mean(str(value), names)
            raise argparse.ArgumentError(
                action, f"invalid choice: {value!r}; choose from: {', '.join(names)}{hint}"
            )


class _PrintVersion(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        print(f"{parser.prog} {trt_lora.__version__}")
        parser.exit()


def add_program_options(parser: CommandParser) -> None:
    """Add what a program has beside its own options: `--version`, `--print-completion SHELL`."""
    parser.add_argument(
        "--version", action=_PrintVersion, nargs=0, help="print the version and exit"
    )
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="print a script that lets a shell complete this command, and exit",
    )


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
