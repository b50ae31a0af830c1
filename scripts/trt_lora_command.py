"""The command `trt-lora` and its subcommands."""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType

from trt_lora.scripts.terminal.console import run
from trt_lora.scripts.terminal.parsing.command_parser import CommandParser, add_program_options

# The modules of `scripts/commands/` by the subcommand that each adds.
_COMMANDS = {
    "generate": "generate_text",
    "chat": "chat",
    "doctor": "doctor",
    "list": "list_files",
    "inspect": "inspect_engine",
    "check": "check_engine",
    "convert-adapter": "convert_adapter",
    "verify": "verify",
    "compare": "compare",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `trt-lora`."""
    run(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> None:
    parser = CommandParser(
        prog="trt-lora", description="Run engines, and look at engines and adapters"
    )
    add_program_options(parser)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in _modules(argv):
        module.add_command(subparsers)
    args = parser.parse_args(argv)
    args.command(args)


def _modules(argv: Sequence[str]) -> Iterator[ModuleType]:
    """Import the module of the subcommand; all of them where none is named, as for `--help`."""
    name = argv[0] if argv else ""
    for module in [_COMMANDS[name]] if name in _COMMANDS else _COMMANDS.values():
        yield import_module(f"trt_lora.scripts.commands.{module}")


if __name__ == "__main__":
    main()
