"""A peer's process: read commands, run the peer, answer; a line of JSON each.

    python worker.py MODULE:CLASS SETUP PACKAGE ...

It runs in the peer's interpreter. The first line out tells that the peer is loaded, or why not.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from trt_lora.scripts.bench.peers.peer import Peer, Rows, Setup
from trt_lora.scripts.measuring.child import imported, parent

NOT_INSTALLED = "not installed"


def main() -> None:
    """Serve until the input ends. What libraries print goes to stderr."""
    place, setup, *packages = sys.argv[1:]
    send = parent()
    try:
        peer = _loaded(place, json.loads(setup))
    except ImportError as error:
        return send({"error": f"{NOT_INSTALLED}: {error}"})
    except Exception as error:  # whatever it is, it is this peer's row
        return send({"error": _text(error)})
    send({"versions": {name: _version(name) for name in packages}})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            send(_answer(peer, command["ids"], command["steps"]))
        except Exception as error:
            send({"error": _text(error)})


def _loaded(place: str, setup: dict[str, Any]) -> Peer:
    peer: Peer = imported(place)()
    paths: dict[str, Any] = {name: Path(setup[name]) for name in ("model", "adapter")}
    paths["files"] = tuple(map(Path, setup["files"]))
    peer.load(Setup(**setup | paths))
    return peer


def _answer(peer: Peer, ids: Rows, steps: int) -> dict[str, Any]:
    answer = peer.answer(ids, steps)
    if wrong := [len(row) for row in answer.tokens if len(row) != steps + 1]:
        raise RuntimeError(f"rows of {wrong} tokens, expected {steps + 1}")
    return answer._asdict()


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
