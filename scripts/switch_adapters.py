"""Answer one prompt with the base model and with each adapter; the runtime script to copy from."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from trt_lora.runtime import LoRAManager, open_engine
from trt_lora.runtime.engines.open_executor import BACKENDS
from trt_lora.scripts.terminal.adapters import (
    BASE,
    adapter_paths,
    add_adapter_option,
    load_adapters,
    timed_switch,
)
from trt_lora.scripts.terminal.answering_options import add_sampling_options, sampling_params
from trt_lora.scripts.terminal.command_parser import CommandParser
from trt_lora.scripts.terminal.console import run
from trt_lora.scripts.terminal.printing import print_json


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = CommandParser(description=__doc__)
    add = parser.add_argument
    add("--engine", type=Path, required=True, metavar="DIR", help="what build-engine made")
    add_adapter_option(add)
    add("--prompt", required=True, help="a user's message")
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")
    add_sampling_options(add)
    add("--json", action="store_true", help="print one JSON object for each answer instead")
    run(lambda: _switch(parser.parse_args(argv)), argv)


def _switch(args: argparse.Namespace) -> None:
    sampling = sampling_params(args, args.engine)
    with open_engine(args.engine, args.backend) as engine:
        load_adapters(engine.adapters, adapter_paths(args.adapter))
        manager = LoRAManager(engine.adapters)
        for name in [None, *engine.adapters.names]:
            microseconds = timed_switch(manager, name)
            answer = engine.generate(args.prompt, adapter=name, sampling=sampling)
            if args.json:
                fields = {"adapter": name or "", "microseconds": microseconds, "text": answer.text}
                print_json(fields, indent=None)
                continue
            print(f"[{name or BASE}, switched in {microseconds:.0f} us] {answer.text.strip()}")


if __name__ == "__main__":
    main()
