"""A virtual environment for each client, below build/clients, kept until its pins change."""

import tomllib
from pathlib import Path

from support.doc_blocks import ROOT
from support.environments import python_with

PINS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("clients.toml").read_text(encoding="utf-8")
)
FOLDER = ROOT / "build" / "clients"
SHARES = ("lm_eval",)  # its `hf` models are those of torch, transformers and PEFT, which are here


def python_of(client: str) -> Path:
    """Return the interpreter that has a client, which is installed if it is not."""
    return python_with(FOLDER / client, PINS[client], shares=client in SHARES)
