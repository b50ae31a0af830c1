"""The flags of `vllm serve`, by vllm_flags.csv: effective here, without effect, or refused.

Effective ones are declared by `serve` itself. Its parser, as vLLM's, should take no abbreviations.
"""

import argparse
import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trt_lora.plugins.errors import ConfigError

_FILE = Path(__file__).with_suffix(".csv")
_UNSET = ("", "None")  # what vLLM reads as not given
_SECRET = "--hf-token"  # no message shows its value
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
        name, _, rest = self.names[0].removeprefix("--").partition("-")
        opposite = {"enable": "disable", "disable": "enable"}.get(name)
        return [f"--no-{name}-{rest}", *([f"--{opposite}-{rest}"] if opposite else [])]

    def spelled(self, value: str) -> str:
        """Return it as it was given, shortened."""
        if self.values == "0":
            return self.names[0] if value == "on" else self.negations[0]
        return self.names[0] if self.names[0] == _SECRET else f"{self.names[0]} {value:.80}"


@cache
def vllm_flags() -> Sequence[VllmFlag]:
    """Return every flag of vLLM 0.33.0, sorted by its name."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return [VllmFlag(n.split(), values, e, why, off.split()) for n, values, e, why, off in rows]


def normalised(argv: Sequence[str]) -> list[str]:
    """Return words as vLLM reads them: dashes in names of options, and `--x.key v` as a value."""
    return list(_normalised(iter(argv)))


def _normalised(words: Iterator[str]) -> Iterator[str]:
    for word in words:
        if word == "--":
            yield from (word, *words)
        elif not _OPTION.match(word):
            yield word
        else:
            option, equals, value = word.partition("=")
            name, dot, key = option.partition(".")
            if dot:
                value = f"{key}={value if equals else next(words, '')}"
            name = name.replace("_", "-") if name.startswith("--") else name
            yield f"{name}={value}" if equals or dot else name


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add what is not effective, and how vLLM switches off what is; none is shown by `--help`."""
    for flag in vllm_flags():
        dest, is_effective = flag.names[0], flag.effect == "effective"
        hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if flag.values == "0":
            off = (dest[2:].replace("-", "_"), False) if is_effective else (dest, "off")
            parser.add_argument(*flag.negations, action="store_const", dest=off[0], const=off[1], **hidden)
        ...
