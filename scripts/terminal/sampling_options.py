"""Options of how tokens are chosen, for every command that answers prompts."""

import argparse
from collections.abc import Callable

from trt_lora.runtime import SamplingParams


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
