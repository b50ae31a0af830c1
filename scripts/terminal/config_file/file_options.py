"""The options that a config file may hold, by their long names, and the type of each."""

import argparse
from typing import Literal

Kind = Literal["flag", "list", "integer", "text"]

# They ask for one run, and describe no engine.
_TYPED_ONLY = ("help", "config", "print_config", "json", "version", "print_completion")


def file_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return the options of a parser without dashes in front; those of two names under both."""
    return {
        name.removeprefix("--"): action
        for action in parser._actions  # argparse has no public list of them
        if action.dest not in _TYPED_ONLY
        for name in action.option_strings
        if name.startswith("--") and not name.startswith("--no-")
    }


def kind_of(action: argparse.Action) -> Kind:
    """Return what the value of an option is in TOML."""
    if action.nargs == 0:
        return "flag"
    if action.nargs == "+":
        return "list"
    return "integer" if action.type is int else "text"
