"""A peer's process: read commands, run the peer, answer; a line of JSON each.

    python worker.py MODULE:CLASS SETUP PACKAGE ...

It runs in the peer's interpreter. The first line out tells that the peer is loaded, or why not.
"""

import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from trt_lora.scripts.bench.peers.peer import Peer, Setup

NOT_INSTALLED = "not installed"


def main() -> None:
    """Serve until the input ends. What libraries print goes to stderr."""
    place, setup, *packages = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(place, json.loads(setup), packages, sys.stdin, answers)


def serve(
    place: str, setup: dict[str, Any], packages: Sequence[str], commands: TextIO, answers: TextIO
) -> None:
    """Load the peer, then answer each command with what it took."""

    def reply(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        peer = _loaded(place, setup)
    except ImportError as error:
        return reply({"error": f"{NOT_INSTALLED}: {error}"})
    except Exception as error:  # whatever it is, it is this peer's row
        return reply({"error": _text(error)})
    reply({"versions": {name: _version(name) for name in packages}})
    for line in commands:
        command = json.loads(line)
        try:
            reply(_answer(peer, command["ids"], command["steps"]))
        except Exception as error:
            reply({"error": _text(error)})


def _loaded(place: str, setup: dict[str, Any]) -> Peer:
    module, _, name = place.partition(":")
    peer: Peer = getattr(importlib.import_module(module), name)()
    paths = {name: Path(setup[name]) for name in ("model", "adapter")}
    peer.load(Setup(**setup | paths | {"files": tuple(map(Path, setup["files"]))}))
    return peer


def _answer(peer: Peer, ids: list[list[int]], steps: int) -> dict[str, Any]:
    prompt = peer.prompt(ids, steps)
    rest = peer.decode()
    tokens = [[*first, *more] for first, more in zip(prompt.tokens, rest.tokens, strict=True)]
    if wrong := [len(row) for row in tokens if len(row) != steps + 1]:
        raise RuntimeError(f"rows of {wrong} tokens, expected {steps + 1}")
    return {"prompt": prompt.seconds, "decode": rest.seconds, "tokens": tokens}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def _text(error: Exception) -> str:
    """One line of what went wrong."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


if __name__ == "__main__":
    main()
