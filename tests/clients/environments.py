"""A virtual environment for each client, below build/clients, kept until its pins change."""

import subprocess
import sys
import tomllib
from pathlib import Path

from support.doc_blocks import ROOT

PINS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("clients.toml").read_text(encoding="utf-8")
)
FOLDER = ROOT / "build" / "clients"


def python_of(client: str) -> Path:
    """Return the interpreter that has a client, which is installed if it is not."""
    folder, pins = FOLDER / client, "\n".join(PINS[client])
    python, done = folder / "bin" / "python", folder / "pins.txt"
    if not done.is_file() or done.read_text(encoding="utf-8") != pins:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile", *PINS[client]]
        subprocess.run(install, check=True)
        done.write_text(pins, encoding="utf-8")
    return python
