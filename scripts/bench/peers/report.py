"""What was measured, as JSON and as Markdown tables."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trt_lora.scripts.bench.peers.peer_list import OURS, PeerEntry
from trt_lora.scripts.bench.peers.process import PeerAnswer
from trt_lora.scripts.bench.peers.rounds import Cell, Results

Row = dict[str, float]


def cell_rows(results: Results, steps: int) -> list[dict[str, Any]]:
    """Return every cell with medians by peer, and ratios to ours."""
    cells = next(iter(results.answers.values()), {})
    return [
        {**cell._asdict(), "peers": _with_ratios(_medians(results, cell, steps))} for cell in cells
    ]


def _medians(results: Results, cell: Cell, steps: int) -> dict[str, Row]:
    return {
        name: _median(cell, answers[cell], steps)
        for name, answers in results.answers.items()
        if answers[cell]
    }


def _median(cell: Cell, answers: Sequence[PeerAnswer], steps: int) -> Row:
    decode = [answer.decode for answer in answers]
    return {
        "decode, tokens/s": cell.batch * steps / statistics.median(decode),
        "decode, slowest / fastest round": max(decode) / min(decode),
        "prompt, ms": statistics.median(answer.prompt for answer in answers) * 1e3,
        "rounds": len(answers),
    }


def _with_ratios(rows: dict[str, Row]) -> dict[str, Row]:
    """Above 1 a peer's decode is faster than ours, and its prompt slower."""
    ours = rows.get(OURS)
    if ours is not None:
        for row in rows.values():
            for name in ("decode, tokens/s", "prompt, ms"):
                row[f"{name} / ours"] = row[name] / ours[name]
    return rows


def markdown(report: Mapping[str, Any], entries: Sequence[PeerEntry]) -> str:
    """Return a table of decode, one of prompts, and one of the peers themselves."""
    head = [f"{cell['batch']} x {cell['context']}" for cell in report["cells"]]
    parts = []
    for title, name, digits in (
        ("Decode, tokens/s of all rows", "decode, tokens/s", 1),
        ("Prompt, ms", "prompt, ms", 0),
    ):
        rows = [[e.title, *_values(report, e.name, name, digits)] for e in entries]
        parts.append(_table([f"{title} (ratio to ours)", *head], rows))
    peers = report["peers"]
    rows = [[e.title, _versions(peers[e.name]), _remark(peers[e.name])] for e in entries]
    parts.append(_table(["peer", "versions", "remark"], rows))
    return "\n\n".join(parts) + "\n"


def _values(report: Mapping[str, Any], peer: str, name: str, digits: int) -> list[str]:
    found = []
    for cell in report["cells"]:
        row = cell["peers"].get(peer)
        if row is None:
            found.append("-" if cell["peers"] else "not reached")
        elif peer == OURS or f"{name} / ours" not in row:
            found.append(f"{row[name]:.{digits}f}")
        else:
            found.append(f"{row[name]:.{digits}f} ({row[f'{name} / ours']:.2f})")
    return found


def _versions(peer: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in peer.get("versions", {}).items())


def _remark(peer: Mapping[str, Any]) -> str:
    same = peer.get("tokens as ours")
    return str(peer.get("error", "" if same is None else f"{same} tokens of an answer as ours"))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(t.replace("|", "/") for t in line) + " |" for line in lines)
