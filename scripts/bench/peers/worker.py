"""A peer's process: read commands, run the peer, answer; a line of JSON each.

    python worker.py MODULE:CLASS SETUP

It runs in the peer's interpreter. The first line out tells that the peer is loaded, or why not.
"""

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from trt_lora.scripts.bench.peers.peer import Peer, Setup

NOT_INSTALLED = "not installed"


def main() -> None:
    """Serve until the input ends. What libraries print goes to stderr."""
    place, setup = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(place, setup, sys.stdin, answers)


def serve(place: str, setup: dict[str, Any], commands: TextIO, answers: TextIO) -> None:
    """Load the peer, then answer each command with what it took."""

    def tell(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        peer = _loaded(place, setup)
    except ImportError as error:
        return tell({"error": f"{NOT_INSTALLED}: {error}"})
    except Exception as error:  # whatever it is, it is this peer's row
        return tell({"error": _text(error)})
    tell({"versions": _versions(setup["packages"])})
    for line in commands:
        command = json.loads(line)
        try:
            tell(_answer(peer, command["ids"], command["steps"]))
        except Exception as error:
            tell({"error": _text(error)})


def _loaded(place: str, setup: dict[str, Any]) -> Peer:
    module, _, name = place.partition(":")
    peer: Peer = getattr(importlib.import_module(module), name)()
    peer.load(
        Setup(
            files=tuple(map(Path, setup["files"])),
            model=Path(setup["model"]),
            adapter=Path(setup["adapter"]),
            threads=setup["threads"],
            max_rows=setup["max_rows"],
            max_len=setup["max_len"],
        )
    )
    return peer


def _answer(peer: Peer, ids: list[list[int]], steps: int) -> dict[str, Any]:
    prompt = peer.prompt(ids, steps)
    rest = peer.decode()
    tokens = [[*first, *more] for first, more in zip(prompt.tokens, rest.tokens, strict=True)]
    if wrong := [len(row) for row in tokens if len(row) != steps + 1]:
        raise RuntimeError(f"rows of {wrong} tokens, expected {steps + 1}")
    return {"prompt": prompt.seconds, "decode": rest.seconds, "tokens": tokens}


def _versions(packages: list[str]) -> dict[str, str]:
    """Versions of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = NOT_INSTALLED
    return found


def _text(error: Exception) -> str:
    """One line of what went wrong."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


if __name__ == "__main__":
    main()
