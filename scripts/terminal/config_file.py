"""Options of `build-engine` in TOML: read, or printed; unknown ones are rejected by name."""

import argparse
import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any, Literal

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean, shown
from trt_lora.scripts.terminal.trtllm_options import IGNORED, REFUSED, without_trtllm_options

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


_EXPECTED: dict[Kind, str] = {
    "flag": "true or false",
    "list": 'a list of strings, such as ["attn_q", "attn_v"]',
    "integer": "a whole number",
    "text": "a string",
}


def read_config(path: Path, parser: argparse.ArgumentParser) -> tuple[dict[str, Any], list[str]]:
    """Read a file of options by their long names, with dashes or underscores.

    Args:
        path: of the file.
        parser: it knows the options.

    Returns:
        The values by the names that the parser's namespace has for them, and a sentence for each
        option of TensorRT-LLM's that means nothing here.

    Raises:
        ConfigError: the file is no TOML, an option does not exist or is there twice, or its value
            is of another type or none of its choices.
        OSError: the file cannot be read.
    """
    options = file_options(parser)
    values: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in _read_toml(path).items():
        name = key.replace("_", "-")
        if note := _trtllm_note(path, name, value):
            notes.append(note)
            continue
        action = _option(path, name, options)
        if action.dest in values:
            raise ConfigError(f"{path}: {name} is there twice, under two names; keep one")
        values[action.dest] = _checked(path, name, value, action)
    return values, notes


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, nested without end
        raise ConfigError(
            f"{path} is not TOML: {error}; build-engine --print-config shows how it is written"
        ) from error


def _trtllm_note(path: Path, name: str, value: object) -> str:
    """The sentence on an option that means nothing here; empty for one of ours."""
    try:
        _, notes = without_trtllm_options([f"--{name}={value}"])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return f"{path}: {notes[0]}" if notes else ""


def _option(path: Path, name: str, options: dict[str, argparse.Action]) -> argparse.Action:
    if name not in options:
        theirs = (option.removeprefix("--") for option in (*IGNORED, *REFUSED))
        raise ConfigError(
            f"{path}: build-engine has no option {shown(name)} for a file"
            f"{did_you_mean(name, [*options, *theirs])}; build-engine --print-config lists all"
        )
    return options[name]


def _checked(path: Path, name: str, value: Any, action: argparse.Action) -> Any:
    """The value as the parser would have it."""
    kind = kind_of(action)
    if not _is(kind, value):
        raise ConfigError(f"{path}: {name} is {shown(value)}, expected {_EXPECTED[kind]}")
    if action.choices is not None and value not in action.choices:
        raise ConfigError(
            f"{path}: {name} is {shown(value)}; choose from: {', '.join(action.choices)}"
        )
    of_file = Path if action.type is Path else lambda item: item
    return [of_file(item) for item in value] if kind == "list" else of_file(value)


def _is(kind: Kind, value: object) -> bool:
    if kind == "list":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return type(value) is {"flag": bool, "integer": int, "text": str}[kind]


_WIDTH = 96
_HEAD = """\
# Options of build-engine, for: build-engine --config FILE
# The command line wins over this file. Paths start where the command runs, as they do there.
# A line that is commented out leaves the choice to build-engine.
"""


def config_text(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return a file that `read_config` reads as the options `args`.

    Raises:
        ConfigError: a path is no text, which TOML cannot hold.
    """
    named: dict[str, tuple[str, argparse.Action]] = {}
    for name, action in file_options(parser).items():
        named.setdefault(action.dest, (name, action))
    blocks = [_block(name, action, getattr(args, dest)) for dest, (name, action) in named.items()]
    return "\n".join([_HEAD, *blocks])


def _block(name: str, action: argparse.Action, value: Any) -> str:
    lines = textwrap.wrap((action.help or "") % vars(action), _WIDTH)
    if action.choices is not None:
        lines.append(f"choose from: {', '.join(action.choices)}")
    return "\n".join([*(f"# {line}" for line in lines), _setting(name, action, value), ""])


def _setting(name: str, action: argparse.Action, value: Any) -> str:
    """`name = value`, commented out where there is no value."""
    if kind_of(action) == "flag":
        return f"{name} = {'true' if value else 'false'}"
    if value is None or value in ((), []):
        return f"# {name} = {action.metavar or action.dest.upper()}"
    if kind_of(action) == "list":
        return f"{name} = [{', '.join(_string(str(item)) for item in value)}]"
    return f"{name} = {value if kind_of(action) == 'integer' else _string(str(value))}"


def _string(text: str) -> str:
    """A basic string, which TOML escapes as JSON does, and DEL too."""
    if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{text!a} is no text, and TOML holds nothing else; rename the file")
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
