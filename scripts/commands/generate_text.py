"""`trt-lora generate`: answer prompts with the base model or an adapter, as the text comes."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import TextTokenizer, generate, open_engine, stream_text
from trt_lora.scripts.terminal.adapters import activate, manager_of
from trt_lora.scripts.terminal.answering_options import (
    add_answering_options,
    add_several_answers_options,
    sampling_params,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add("prompt", nargs="+", metavar="PROMPT", help="a user's message; several run in one batch")
    add_answering_options(add)
    add_several_answers_options(add)
    add("--json", action="store_true", help="print one JSON object for each prompt instead")
    parser.set_defaults(command=_generate)


def _generate(args: argparse.Namespace) -> None:
    sampling = sampling_params(args, args.engine)
    if sampling.logprobs is not None and not args.json:
        raise ConfigError(f"--logprobs is {sampling.logprobs}, and text has none; add --json")
    with open_engine(args.engine, args.backend) as engine:
        tokenizer = TextTokenizer(engine.directory)
        manager = manager_of(engine, args.adapter)
        activate(manager, args.use)
        if len(args.prompt) == 1 and sampling.n == 1 and not args.json:
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
        for number, answer in enumerate(answers):
            prompt = args.prompt[number // sampling.n]
            fields = {"prompt": prompt, "adapter": args.use, **asdict(answer)}
            print(json.dumps(fields) if args.json else answer.text)
