"""`trt-lora generate`: answer prompts with the base model or an adapter, as the text comes.

More prompts than the engine's batch has rows are answered batch by batch. Of several answers each
has a line before it: its prompt's number, and the prompt.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import Chat, Engine, SamplingParams, open_engine
from trt_lora.runtime.generation.text.prompts import Prompt
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
    template_variables,
)
from trt_lora.scripts.terminal.printing import visible

_SHOWN = 70  # characters of a prompt before its answer


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    what = (
        f"a user's message, or an encoder-decoder's source; {STDIN} is standard input, all of it "
        "as one message"
    )
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
    variables = template_variables(args)
    with open_engine(args.engine, args.backend) as engine:
        load_adapters(engine.adapters, paths)
        adapter = adapter_or_base(engine.adapters, use)
        asked = [_asked(prompt, variables) for prompt in prompts]
        streams = engine.manifest.encoder is None and not args.json
        if len(prompts) == 1 and sampling.n == 1 and streams:
            for text in engine.stream(asked[0], adapter=adapter, sampling=sampling):
                print(text, end="", flush=True)
            print()
            return
        answers = _answers(engine, adapter, asked, sampling)
        if args.json:
            _print_json(answers, prompts, adapter)
        else:
            _print_text(answers, prompts, sampling.n)


def _asked(prompt: str, variables: Mapping[str, Any]) -> Prompt:
    if not variables:
        return prompt
    return Chat([{"role": "user", "content": prompt}], chat_template_kwargs=variables)


def _print_json(
    answers: Iterable[tuple[int, Completion]], prompts: Sequence[str], adapter: str | None
) -> None:
    for number, answer in answers:
        fields = {"prompt": prompts[number], "adapter": adapter or "", **asdict(answer)}
        if answer.logprobs is not None:
            steps = answer.logprobs
            fields["logprobs"] = [{i: p._asdict() for i, p in step.items()} for step in steps]
        print(json.dumps(fields), flush=True)


def _print_text(
    answers: Iterable[tuple[int, Completion]], prompts: Sequence[str], count: int
) -> None:
    for number, answer in answers:
        of = f", answer {answer.index + 1} of {count}" if count > 1 else ""
        print(f"[{number + 1}{of}] {_beginning(prompts[number])}")
        print(answer.text, flush=True)


def _answers(
    engine: Engine, adapter: str | None, prompts: Sequence[Prompt], sampling: SamplingParams
) -> Iterator[tuple[int, Completion]]:
    """Yield every answer with the number of its prompt, as each batch ends.

    Of an encoder-decoder they are answers to sources.
    """
    most = max(engine.manifest.max_batch_size // sampling.n, 1)
    for start in range(0, len(prompts), most):
        part: Any = prompts[start : start + most]
        if engine.manifest.encoder is None:
            answers = engine.generate(part, adapter=adapter, sampling=sampling)
        else:
            answers = engine.generate(sources=part, adapter=adapter, sampling=sampling)
        for place, answer in enumerate(answers):
            yield start + place // sampling.n, answer


def _beginning(prompt: str) -> str:
    line, *more = prompt.split("\n")
    cut = line[:_SHOWN]
    return visible(cut) + ("..." if more or cut != line else "")
