"""Options of every command that answers prompts: adapters, backend, and how tokens are chosen."""

import argparse
from collections.abc import Callable

from trt_lora.runtime import SamplingParams
from trt_lora.runtime.engines.open_engine import BACKENDS
from trt_lora.scripts.terminal.adapters import add_adapter_option


def add_answering_options(add: Callable[..., object]) -> None:
    """Add all of them, and `--use` for the adapter that answers."""
    add_adapter_option(add)
    add("--use", default="", metavar="NAME", help="the adapter that answers (default: base model)")
    add("--backend", choices=BACKENDS, default="auto", help="where the engine runs")
    add_sampling_options(add)


def add_sampling_options(add: Callable[..., object]) -> None:
    """Add them, with the defaults of `SamplingParams`."""
    default = SamplingParams()
    add("--max-new-tokens", type=int, default=default.max_new_tokens, metavar="N")
    add("--temperature", type=float, default=default.temperature, help="0 is greedy")
    add("--top-k", type=int, default=default.top_k, help="0 keeps all")
    add("--top-p", type=float, default=default.top_p)
    add("--seed", type=int, default=default.seed)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return what the parsed options ask for.

    Raises:
        ConfigError: a value is out of its range.
    """
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
