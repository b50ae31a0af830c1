"""Memory of processes, in bytes."""

from collections.abc import Sequence
from pathlib import Path

_PAGE = 4096


def resident(pids: Sequence[int]) -> list[int]:
    """Return what of it lies in RAM, of each process."""
    return [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE for pid in pids]


def most_growth(before: Sequence[int], after: Sequence[int]) -> float:
    """Return the largest growth of one of them, as a share of what it had."""
    return max(b / a for a, b in zip(before, after, strict=True)) - 1
