"""The command `trt-lora` and its subcommands."""

import sys
from collections.abc import Sequence
from importlib import import_module

from trt_lora.scripts.terminal.console import run
from trt_lora.scripts.terminal.parsing.command_parser import CommandParser, add_program_options

# By subcommand: the module of `scripts/commands/` with its options, and its line of `--help`.
_COMMANDS = {
    "generate": ("generate_text", "answer prompts with an adapter"),
    "chat": ("chat", "talk to an engine, switching adapters"),
    "doctor": ("doctor", "what can run here, and why an engine cannot"),
    "list": ("list_files", "engines and adapters under a folder"),
    "inspect": ("inspect_engine", "what an engine takes, and every tensor of an adapter"),
    "check": ("check_engine", "every byte of an engine's files against its manifest"),
    "convert-adapter": ("convert_adapter", "an adapter from any format to any other"),
    "verify": ("verify", "an engine against transformers and PEFT"),
    "compare": ("compare", "an engine against merged weights, PEFT or another engine"),
    "bench": ("bench", "how fast an engine answers, with adapters and without"),
    "report": ("report", "an engine and its adapters as one page of HTML"),
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
    wanted = _COMMANDS if argv and argv[0].startswith("--print") else argv
    for name, (module, summary) in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name in wanted:  # the others are not imported: `--help` is to come at once
            command = import_module(f"trt_lora.scripts.commands.{module}")
            subparser.description = command.__doc__
            command.add_options(subparser)
    args = parser.parse_args(argv)
    args.command(args)


if __name__ == "__main__":
    main()
