"""`trt-lora generate`: answer prompts with the base model or an adapter, as the text comes."""

import argparse
import json
from pathlib import Path
from typing import Any

from trt_lora.runtime import LoRAManager, TextTokenizer, generate, open_engine, stream_text
from trt_lora.runtime.engines.open_engine import BACKENDS
from trt_lora.scripts.terminal.adapters import activate, load_adapters
from trt_lora.scripts.terminal.sampling_options import add_sampling_options, sampling_params


def add_command(subparsers: Any) -> None:
    """Add the subcommand to those of `trt-lora`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate", help="answer prompts with an adapter", description=__doc__
    )
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add("prompt", nargs="+", metavar="PROMPT", help="a user's message; several run in one batch")
    add_adapter_options(add)
    add_sampling_options(add)
    add("--json", action="store_true", help="print one JSON object for each prompt instead")
    parser.set_defaults(command=_generate)


def add_adapter_options(add: Any) -> None:
    """Add the options of adapters and of where the engine runs."""
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="an adapter of any format, or org/name on the hub; may be repeated",
    )
    add("--use", default="", metavar="NAME", help="the adapter that answers (default: base model)")
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")


def _generate(args: argparse.Namespace) -> None:
    sampling = sampling_params(args)
    with open_engine(args.engine, args.backend) as engine:
        manager, tokenizer = LoRAManager(), TextTokenizer(engine.directory)
        manager.initialize_engine_bindings(engine)
        load_adapters(manager, args.adapter)
        activate(manager, args.use)
        if len(args.prompt) == 1 and not args.json:
            (prompt,) = args.prompt
            for text in stream_text(
                engine, prompt, manager=manager, sampling=sampling, tokenizer=tokenizer
            ):
                print(text, end="", flush=True)
            print()
            return
        answers = generate(
            engine, args.prompt, manager=manager, sampling=sampling, tokenizer=tokenizer
        )
        for prompt, answer in zip(args.prompt, answers, strict=True):
            fields = {"prompt": prompt, "adapter": args.use, "text": answer.text}
            more = {"finish_reason": answer.finish_reason, "token_ids": answer.token_ids}
            print(json.dumps(fields | more) if args.json else answer.text)
