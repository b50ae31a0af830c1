"""The command `trt-lora` and its subcommands."""

import argparse
from collections.abc import Sequence

from trt_lora.scripts.commands import (
    bench,
    chat,
    check_engine,
    compare,
    convert_adapter,
    generate_text,
    inspect_engine,
    report,
    verify,
)
from trt_lora.scripts.terminal.console import run

_COMMANDS = (
    *(generate_text, chat),
    *(inspect_engine, check_engine, convert_adapter, verify, compare),
    *(bench, report),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `trt-lora`."""
    run(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="trt-lora", description="Run engines, and look at engines and adapters"
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_command(subparsers)
    args = parser.parse_args(argv)
    args.command(args)


if __name__ == "__main__":
    main()
