"""The flags of `vllm serve`, by vllm_flags.csv: effective here, without effect, or refused.

Effective ones are declared by `serve` itself. Its parser, as vLLM's, should take no abbreviations.
"""

import argparse
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from trt_lora.plugins.errors import ConfigError

_OPTION = re.compile(r"--?[A-Za-z]")


@dataclass(frozen=True)
class VllmFlag:
    """A line of the table."""

    names: Sequence[str]  # messages have the first
    values: str  # how many it takes: 0 of a switch, 1, + or ?
    effect: str  # effective, none or refused
    why: str  # it has no effect, or what to do instead
    neutral: Sequence[str]  # values with which a refused flag is taken; off is that of a switch

    @property
    def negations(self) -> list[str]:
        """The spellings that switch it off, as argparse and vLLM make them."""
        kind, _, rest = self.names[0][2:].partition("-")
        opposite = {"enable": "disable", "disable": "enable"}.get(kind)
        return [f"--no-{self.names[0][2:]}", *([f"--{opposite}-{rest}"] if opposite else [])]

    def spelled(self, value: str) -> str:
        """Return it as it was given, shortened, and a secret without its value."""
        if self.values == "0":
            return self.negations[0] if value == "off" else self.names[0]
        # --hf-token alone takes one or none.
        return self.names[0] if self.values == "?" else f"{self.names[0]} {value:.80}"


@cache
def vllm_flags() -> Sequence[VllmFlag]:
    """Return every flag of vLLM 0.33.0, sorted by its name."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return [VllmFlag(n.split(), count, e, why, off.split()) for n, count, e, why, off in rows]


def normalised(argv: Sequence[str]) -> list[str]:
    """Return words as vLLM reads them: dashes in names of options, and `--x.key v` as a value."""
    words, found = iter(argv), list[str]()
    for word in words:
        if word == "--":
            return [*found, word, *words]
        if _OPTION.match(word):
            option, equals, value = word.partition("=")
            name, dot, key = option.partition(".")
            if dot:
                equals, value = "=", f"{key}={value if equals else next(words, '')}"
            word = name.replace("_", "-") + equals + value
        found.append(word)
    return found


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add what is not effective, and how vLLM switches off what is; `--help` shows none of it."""
    add = partial(parser.add_argument, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for flag in vllm_flags():
        name, is_switch = flag.names[0], flag.values == "0"
        if flag.effect == "effective":
            if is_switch:
                add(*flag.negations, dest=name[2:].replace("-", "_"), action="store_false")
        elif is_switch:
            add(*flag.names, dest=name, action="store_const", const="on")
            add(*flag.negations, dest=name, action="store_const", const="off")
        else:
            add(*flag.names, dest=name, nargs=None if flag.values == "1" else flag.values)


def check_vllm_flags(args: argparse.Namespace) -> list[str]:
    """Return a line for each flag that was given and has no effect.

    Raises:
        ConfigError: a flag is refused, and its value is none of those that ask for nothing.
    """
    lines, given = [], vars(args)
    for flag in (flag for flag in vllm_flags() if flag.names[0] in given):
        value = given[flag.names[0]]
        text = value if isinstance(value, str) else " ".join(value or ())
        if flag.effect == "none":
            lines.append(f"{flag.spelled(text)} has no effect: {flag.why}")
        elif text not in ("", "None", *flag.neutral):  # vLLM reads the first two as not given
            raise ConfigError(f"{flag.spelled(text)} is not supported: {flag.why}")
    return lines


def table() -> str:
    """Return the table of docs/vllm-flags.md."""
    return "| flag | here | why | taken |\n|---|---|---|---|\n" + "".join(map(_row, vllm_flags()))


def _row(flag: VllmFlag) -> str:
    names, neutral = (", ".join(f"`{w}`" for w in words) for words in (flag.names, flag.neutral))
    return f"| {names} | {flag.effect.replace('none', 'no effect')} | {flag.why} | {neutral} |\n"
