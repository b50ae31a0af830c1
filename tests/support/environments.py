"""A virtual environment for some requirements, kept until they change, and what runs in it."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from support.doc_blocks import ROOT


def python_with(folder: Path, pins: Sequence[str], *, shares: bool) -> Path:
    """Return the interpreter of an environment that has what is pinned, installed if it is not.

    Args:
        folder: of the environment.
        pins: what pip is asked for, and its options.
        shares: behind that it has what is installed here, so that torch is not installed again.
    """
    python, done = folder / "bin" / "python", folder / "pins.txt"
    if not done.is_file() or done.read_text(encoding="utf-8") != "\n".join(pins):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        if shares:
            _share_packages(python)
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *pins]
        subprocess.run(install, check=True)
        done.write_text("\n".join(pins), encoding="utf-8")
    return python


def run_module(python: Path, module: str, folder: Path) -> str:
    """Run a module of the tests by an interpreter, in a folder; return what it prints.

    Raises:
        AssertionError: it failed; the message is what it wrote.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{ROOT / 'src'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it is fetched
        "NO_PROXY": "127.0.0.1,localhost",
    }
    command = [str(python), "-m", module]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def _share_packages(python: Path) -> None:
    """Let an environment find what is installed in this one, behind what it has itself."""
    place = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    found = subprocess.run([python, *place], check=True, capture_output=True, text=True)
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (Path(found.stdout.strip()) / "shared.pth").write_text(line, encoding="utf-8")
