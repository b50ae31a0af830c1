"""`trt-lora generate`: answer prompts with the base model or an adapter, as the text comes.

More prompts than the engine's batch has rows are answered batch by batch. Of several answers each
has a line before it: its prompt's number, and the prompt.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import Engine, SamplingParams, open_engine
from trt_lora.runtime.serving.generate import Completion
from trt_lora.scripts.terminal.adapters import (
    adapter_in_use,
    adapter_or_base,
    adapter_paths,
    load_adapters,
)
from trt_lora.scripts.terminal.answering_options import (
    STDIN,
    add_answering_options,
    add_several_answers_options,
    prompts_of,
    sampling_params,
)
from trt_lora.scripts.terminal.printing import visible

_SHOWN = 70  # characters of a prompt before its answer


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    what = f"a user's message; {STDIN} is standard input, all of it as one message"
    prompt = add("prompt", nargs="+", default=[], metavar="PROMPT", help=what)
    prompt.required = False  # "*" would take no word between options, as behind --use
    add("--prompts", type=Path, metavar="FILE", help="more of them, a message a line")
    add_answering_options(add)
    add_several_answers_options(add)
    add("--json", action="store_true", help="print one JSON object for each answer instead")
    parser.set_defaults(command=_generate)


def _generate(args: argparse.Namespace) -> None:
    sampling = sampling_params(args, args.engine)
    if sampling.logprobs is not None and not args.json:
        raise ConfigError(f"--logprobs is {sampling.logprobs}, and text has none; add --json")
    paths = adapter_paths(args.adapter)
    use = adapter_in_use(args.use, list(paths))
    prompts = prompts_of(args.prompt, args.prompts)
    with open_engine(args.engine, args.backend) as engine:
        load_adapters(engine.adapters, paths)
        adapter = adapter_or_base(engine.adapters, use)
        if args.json:
            _print_json(engine, adapter, prompts, sampling)
        elif len(prompts) == 1 and sampling.n == 1:
            _stream(engine, adapter, prompts[0], sampling)
        else:
            _print_text(engine, adapter, prompts, sampling)


def _stream(engine: Engine, adapter: str | None, prompt: str, sampling: SamplingParams) -> None:
    for text in engine.stream(prompt, adapter=adapter, sampling=sampling):
        print(text, end="", flush=True)
    print()


def _print_json(
    engine: Engine, adapter: str | None, prompts: Sequence[str], sampling: SamplingParams
) -> None:
    for number, answer in _answers(engine, adapter, prompts, sampling):
        fields = {"prompt": prompts[number], "adapter": adapter or "", **asdict(answer)}
        print(json.dumps(fields), flush=True)


def _print_text(
    engine: Engine, adapter: str | None, prompts: Sequence[str], sampling: SamplingParams
) -> None:
    for number, answer in _answers(engine, adapter, prompts, sampling):
        of = f", answer {answer.index + 1} of {sampling.n}" if sampling.n > 1 else ""
        print(f"[{number + 1}{of}] {_beginning(prompts[number])}")
        print(answer.text, flush=True)


def _answers(
    engine: Engine, adapter: str | None, prompts: Sequence[str], sampling: SamplingParams
) -> Iterator[tuple[int, Completion]]:
    """Yield every answer with the number of its prompt, as each batch ends."""
    most = max(engine.manifest.max_batch_size // sampling.n, 1)
    for start in range(0, len(prompts), most):
        answers = engine.generate(prompts[start : start + most], adapter=adapter, sampling=sampling)
        for place, answer in enumerate(answers):
            yield start + place // sampling.n, answer


def _beginning(prompt: str) -> str:
    line, *more = prompt.split("\n")
    cut = line[:_SHOWN]
    return visible(cut) + ("..." if more or cut != line else "")
