"""A virtual environment for each quantisation library, below build/formats."""

import tomllib
from pathlib import Path

from support.doc_blocks import ROOT
from support.environments import python_with

PINS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("formats.toml").read_text(encoding="utf-8")
)


def python_of(library: str) -> Path:
    """Return the interpreter that has a library; torch and transformers are those of here."""
    return python_with(ROOT / "build" / "formats" / library, PINS[library], shares=True)
