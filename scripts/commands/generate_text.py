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
from trt_lora.runtime import (
    Engine,
    LoRAManager,
    SamplingParams,
    TextTokenizer,
    generate,
    open_engine,
    stream_text,
)
from trt_lora.runtime.serving.generate import Completion
from trt_lora.scripts.terminal.adapters import activate, adapter_in_use, adapter_paths, manager_of
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
        manager = manager_of(engine, paths)
        activate(manager, use)
        if args.json:
            _print_json(engine, manager, prompts, sampling)
        elif len(prompts) == 1 and sampling.n == 1:
            _stream(engine, manager, prompts[0], sampling)
        else:
            _print_text(engine, manager, prompts, sampling)


def _stream(engine: Engine, manager: LoRAManager, prompt: str, sampling: SamplingParams) -> None:
    for text in stream_text(engine, prompt, manager=manager, sampling=sampling):
        print(text, end="", flush=True)
    print()


def _print_json(
    engine: Engine, manager: LoRAManager, prompts: Sequence[str], sampling: SamplingParams
) -> None:
    adapter = manager.get_active_adapter_name()
    for number, answer in _answers(engine, manager, prompts, sampling):
        fields = {"prompt": prompts[number], "adapter": adapter, **asdict(answer)}
        print(json.dumps(fields), flush=True)


def _print_text(
    engine: Engine, manager: LoRAManager, prompts: Sequence[str], sampling: SamplingParams
) -> None:
    for number, answer in _answers(engine, manager, prompts, sampling):
        of = f", answer {answer.index + 1} of {sampling.n}" if sampling.n > 1 else ""
        print(f"[{number + 1}{of}] {_beginning(prompts[number])}")
        print(answer.text, flush=True)


def _answers(
    engine: Engine, manager: LoRAManager, prompts: Sequence[str], sampling: SamplingParams
) -> Iterator[tuple[int, Completion]]:
    """Yield every answer with the number of its prompt, as each batch ends."""
    tokenizer = TextTokenizer(engine.directory)
    most = max(engine.manifest.max_batch_size // sampling.n, 1)
    for start in range(0, len(prompts), most):
        batch = prompts[start : start + most]
        answers = generate(engine, batch, manager=manager, sampling=sampling, tokenizer=tokenizer)
        for place, answer in enumerate(answers):
            yield start + place // sampling.n, answer


def _beginning(prompt: str) -> str:
    line, *more = prompt.split("\n")
    cut = line[:_SHOWN]
    return visible(cut) + ("..." if more or cut != line else "")
