"""A virtual environment for each framework, below build/scaleout, kept until its pins change."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

from support.doc_blocks import ROOT
from support.environments import python_with

PINS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("scaleout.toml").read_text(encoding="utf-8")
)
_ALONE: Any = PINS.pop("alone")  # by framework: what is installed without its dependencies


def python_of(framework: str) -> Path:
    """Return the interpreter that has a framework, which is installed if it is not."""
    folder = ROOT / "build" / "scaleout" / framework
    python = python_with(folder, PINS[framework], shares=False)
    alone, done = _ALONE.get(framework, []), folder / "alone.txt"
    if alone and not (done.is_file() and done.read_text(encoding="utf-8") == "\n".join(alone)):
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps", *alone]
        subprocess.run(install, check=True)
        done.write_text("\n".join(alone), encoding="utf-8")
    return python
