"""The fenced blocks of the README and of other documents, which are tests."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str


def blocks(document: str = "README.md") -> list[Block]:
    """Return a document's blocks in their order."""
    parts = (ROOT / document).read_text(encoding="utf-8").split("```")
    return [Block(*part.split("\n", 1)) for part in parts[1::2]]


def build_blocks() -> dict[str, Block]:
    """Return the blocks that build engines for other blocks, by the engine's name."""
    found = re.compile(r"build-engine .*--output engines/(\w+) ", re.DOTALL)
    documents = ("README.md", "docs/many-adapters.md")
    named = [(found.match(b.text), b) for document in documents for b in blocks(document)]
    return {match[1]: block for match, block in named if match}


def run_block(block: Block, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a bash or python block in `folder` as a user would, and return what it prints.

    `environment` holds variables beside those of this process.
    """
    shell = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*shell[block.language], block.text],
        cwd=folder,
        env=os.environ | {"PATH": path} | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout
