"""The Python files and packages of the checkout, as git knows them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("builder", "plugins", "runtime", "scripts")


def files(*patterns: str) -> list[Path]:
    """Return the tracked files that match, relative to the checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [Path(line) for line in listed.splitlines() if (ROOT / line).is_file()]


def product_files() -> list[Path]:
    """Return the Python files of the four packages."""
    return files(*(f"{package}/*.py" for package in PACKAGES))
