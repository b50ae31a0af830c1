"""The command `trt-lora` and its subcommands."""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType

from trt_lora.scripts.terminal.command_parser import CommandParser, add_program_options
from trt_lora.scripts.terminal.console import run

_FOLDER = "trt_lora.scripts.commands"
# By subcommand: the module with its options, and its line of `--help`.
_COMMANDS = {
    "generate": ("generate_text", "answer prompts with an adapter"),
    "chat": ("chat", "talk to an engine, switching adapters"),
    "serve": ("serve", "answer over HTTP, as vLLM does"),
    "doctor": ("doctor", "what can run here, and why an engine cannot"),
    "list": ("list_files", "engines and adapters under a folder"),
    "inspect": ("inspect_engine", "what an engine takes, and every tensor of an adapter"),
    "check": ("check_engine", "every byte of an engine's files against its manifest"),
    "convert-adapter": ("convert_adapter", "an adapter from any format to any other"),
    "merge": ("merge", "an adapter that no engine takes, into its base model"),
    "verify": ("verify", "an engine against transformers and PEFT"),
    "compare": ("compare", "an engine against merged weights or another engine"),
    "bench": ("bench", "how fast an engine answers, with adapters and without"),
    "report": ("report", "an engine and its adapters as one page of HTML"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `trt-lora`."""
    words = sys.argv[1:] if argv is None else argv
    # Outside of `run`: while modules are imported, Ctrl-C is the entry point's.
    modules = {name: import_module(f"{_FOLDER}.{_COMMANDS[name][0]}") for name in _wanted(words)}
    run(lambda: _main(words, modules), words)


def _wanted(words: Sequence[str]) -> list[str]:
    """The subcommands whose options are needed; the others are not imported: `--help` is quick."""
    wanted = _COMMANDS if words and words[0].startswith("--print") else words
    return [name for name in _COMMANDS if name in wanted]


def _main(words: Sequence[str], modules: Mapping[str, ModuleType]) -> None:
    parser = CommandParser(
        prog="trt-lora", description="Run engines, and look at engines and adapters"
    )
    add_program_options(parser)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, summary) in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if command := modules.get(name):
            subparser.description = command.__doc__
            command.add_options(subparser)
    named = next((word for word in words if word in _COMMANDS), "")
    args = parser.parse_args(getattr(modules.get(named), "normalised", list)(words))
    args.command(args)


if __name__ == "__main__":
    main()
