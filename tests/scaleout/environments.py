"""A virtual environment for each framework, below build/scaleout, kept until its pins change."""

import tomllib
from pathlib import Path

from support.doc_blocks import ROOT
from support.environments import python_with

PINS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("scaleout.toml").read_text(encoding="utf-8")
)


def python_of(framework: str) -> Path:
    """Return the interpreter that has a framework, which is installed if it is not."""
    return python_with(ROOT / "build" / "scaleout" / framework, PINS[framework], shares=False)
