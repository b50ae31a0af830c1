"""A virtual environment for each client, below build/clients, kept until its pins change."""

import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from support.doc_blocks import ROOT

PINS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("clients.toml").read_text(encoding="utf-8")
)
FOLDER = ROOT / "build" / "clients"
SHARES = ("lm_eval",)  # its `hf` models are those of torch, transformers and PEFT, which are here


def python_of(client: str) -> Path:
    """Return the interpreter that has a client, which is installed if it is not."""
    folder, pins = FOLDER / client, "\n".join(PINS[client])
    python, done = folder / "bin" / "python", folder / "pins.txt"
    if not done.is_file() or done.read_text(encoding="utf-8") != pins:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        if client in SHARES:
            _share_packages(python)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *PINS[client]]
        subprocess.run(install, check=True)
        done.write_text(pins, encoding="utf-8")
    return python


def _share_packages(python: Path) -> None:
    """Let an environment find what is installed in this one, behind what it has itself."""
    place = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    found = subprocess.run([python, *place], check=True, capture_output=True, text=True)
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (Path(found.stdout.strip()) / "shared.pth").write_text(line, encoding="utf-8")
