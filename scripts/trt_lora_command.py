"""The command `trt-lora` and its subcommands."""

from collections.abc import Sequence

from trt_lora.scripts.commands import (
    chat,
    check_engine,
    compare,
    convert_adapter,
    doctor,
    generate_text,
    inspect_engine,
    list_files,
    verify,
)
from trt_lora.scripts.terminal.command_parser import CommandParser, add_program_options
from trt_lora.scripts.terminal.console import run

_COMMANDS = (
    *(generate_text, chat),
    *(doctor, list_files, inspect_engine, check_engine, convert_adapter, verify, compare),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `trt-lora`."""
    run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    parser = CommandParser(
        prog="trt-lora", description="Run engines, and look at engines and adapters"
    )
    add_program_options(parser)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_command(subparsers)
    args = parser.parse_args(argv)
    args.command(args)


if __name__ == "__main__":
    main()
