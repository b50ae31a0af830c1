"""Write options of `build-engine` as TOML: every option with its help and its value."""

import argparse
import json
import textwrap
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.scripts.terminal.config_file.file_options import file_options, kind_of

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
