"""Options of every command that answers prompts: prompts, adapters, backend, sampling."""

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import SamplingParams
from trt_lora.runtime.engines.open_executor import BACKENDS
from trt_lora.runtime.generation.parameters.default_sampling import default_sampling
from trt_lora.runtime.generation.parameters.sampling_params import GREEDY
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.scripts.terminal.adapters import add_adapter_option, add_use_option

_GENERATION_CONFIGS = ("engine", "none")

# The options that are fields of `SamplingParams` under the same name.
_FIELDS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "n", "logprobs"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "bad_words"),
    "skip_special_tokens",
)


def add_answering_options(add: Callable[..., object]) -> None:
    """Add all of them, and `--use` for the adapter that answers."""
    add_adapter_option(add)
    add_use_option(add)
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")
    add("--chat-template-kwargs", metavar="JSON", help="variables of the model's chat template")
    add_sampling_options(add)


def add_sampling_options(add: Callable[..., object]) -> None:
    """Add those of one answer; where none is given, the engine's generation_config.json counts."""
    add("--max-tokens", type=int, metavar="N", help=f"default: {GREEDY.max_tokens}")
    add("--temperature", type=float, help=f"0 is greedy; default: {GREEDY.temperature:g}")
    add("--top-k", type=int, help="0 keeps all")
    add("--top-p", type=float)
    add("--min-p", type=float, help="least probability, in parts of the greatest")
    add("--repetition-penalty", type=float, help="above 1: what was said becomes rarer")
    add("--presence-penalty", type=float, help="subtracted from what the answer holds")
    add("--frequency-penalty", type=float, help="the same, for each time that it does")
    add("--logit-bias", action="append", metavar="ID=VALUE", help="of a token; may be repeated")
    add("--stop", action="append", metavar="TEXT", help="ends the answer; may be repeated")
    help_text = "the answer ends behind what ends it"
    add("--include-stop-str-in-output", action="store_true", default=None, help=help_text)
    help_text = "a token that ends the answer; may be repeated"
    add("--stop-token-ids", action="append", type=int, metavar="ID", help=help_text)
    help_text = "the model's own stop tokens end nothing"
    add("--ignore-eos", action="store_true", default=None, help=help_text)
    add("--min-tokens", type=int, metavar="N", help="before which nothing ends the answer")
    help_text = "what the answer never says; may be repeated"
    add("--bad-words", action="append", metavar="TEXT", help=help_text)
    special = {"dest": "skip_special_tokens", "action": "store_false", "default": None}
    add("--no-skip-special-tokens", **special, help="show them in the text")
    add("--seed", type=int, help="default: another one each time")
    add("--json-schema", type=Path, metavar="FILE", help="what the answer has to be")
    add("--regex", help="what the answer has to be, in Rust's syntax")
    add("--grammar", type=Path, metavar="FILE", help="what the answer has to be, in Lark's syntax")
    help_text = "where defaults come from: the engine's generation_config.json, or nowhere"
    add("--generation-config", choices=_GENERATION_CONFIGS, default="engine", help=help_text)


def add_several_answers_options(add: Callable[..., object]) -> None:
    """Add those of commands that print more than the text of one answer."""
    add("--n", type=int, help="answers to each prompt")
    add("--logprobs", type=int, metavar="N", help="log probabilities of so many tokens a step")


def sampling_params(args: argparse.Namespace, engine: Path) -> SamplingParams:
    """Return what the parsed options ask for, and the engine's recommendation elsewhere.

    Raises:
        ConfigError: a value is out of its range, contradicts another, or a file cannot be read.
    """
    given = {name: value for name in _FIELDS if (value := getattr(args, name, None)) is not None}
    if args.logit_bias is not None:
        given["logit_bias"] = _biases(args.logit_bias)
    if (wanted := _structured_outputs(args)) is not None:
        given["structured_outputs"] = wanted
    takes_defaults = args.generation_config == "engine"
    default = default_sampling(engine) if takes_defaults else GREEDY
    return replace(default, **given)


def template_variables(args: argparse.Namespace) -> dict[str, Any]:
    """Return what the parsed options give the model's chat template.

    Raises:
        ConfigError: it is no JSON object.
    """
    text = args.chat_template_kwargs or "{}"
    try:
        variables = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs is {text!r}, expected JSON: {error}") from error
    if not isinstance(variables, dict):
        raise ConfigError(f"--chat-template-kwargs is {text!r}, expected an object: {{...}}")
    return variables


def _biases(texts: list[str]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in map(_bias, texts):
        if token in biases:
            raise ConfigError(f"--logit-bias names token {token} twice; give it one value")
        biases[token] = bias
    return biases


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(f"--logit-bias is {text!r}, expected ID=VALUE, such as 5=-1.5") from None


def _structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    schema, grammar = (
        None if p is None else read_text(p) for p in (args.json_schema, args.grammar)
    )
    if schema is None and grammar is None and args.regex is None:
        return None
    return StructuredOutputsParams(json=schema, regex=args.regex, grammar=grammar)


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        ConfigError: it cannot be read, or is no such text.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


STDIN = "-"  # as an argument


def prompts_of(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts that are arguments, `-` among them, and behind them those of a file.

    Raises:
        ConfigError: there is none, or what they are read from cannot be read.
    """
    if arguments.count(STDIN) > 1:
        raise ConfigError(f"{STDIN} is there twice, and standard input is one prompt; pass it once")
    lines = [] if file is None else prompt_lines(file)
    if not arguments and not lines:
        raise ConfigError(
            f"nothing to answer; pass a PROMPT, {STDIN} to read it from standard input, or "
            "--prompts FILE"
        )
    return [*_read(arguments), *lines]


def _read(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        is_stdin = argument == STDIN
        yield standard_input("a prompt").read().removesuffix("\n") if is_stdin else argument


def prompt_lines(path: Path) -> list[str]:
    """Return the lines of a file that are not blank.

    Raises:
        ConfigError: it cannot be read, or has none.
    """
    prompts = [line for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt; write one a line")
    return prompts


def standard_input(what: str) -> TextIO:
    """Return standard input, which may hold bytes that are no text: the tokenizer says so.

    Raises:
        ConfigError: it is closed; the message names what was to be read.
    """
    if sys.stdin is None:
        raise ConfigError(f"standard input is closed, and {what} is read from it; open it")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin
