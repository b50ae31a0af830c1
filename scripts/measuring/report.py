"""JSON report of a run: one row for each cell of a workload."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_lora.scripts.measuring.turns import Spread


@dataclass(frozen=True)
class ResultRow:
    """One cell of a workload: what each version took, and the ratios between them."""

    name: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, float] = field(default_factory=dict)  # with the unit in the name
    ratios: Mapping[str, Spread | float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the row; numbers have four digits, and what is not finite is null."""
        result: dict[str, Any] = {"name": self.name, "sizes": dict(self.sizes)}
        result["variants"] = {name: _short(value) for name, value in self.variants.items()}
        result["ratios"] = {name: _ratio(value) for name, value in self.ratios.items()}
        return result | ({"notes": dict(self.notes)} if self.notes else {})


class Report:
    """The JSON file, rewritten whole at every change: a run that is killed loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = {}

    def put(self, **sections: Any) -> None:
        """Set sections and write the file."""
        self.content.update(sections)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.content, indent=1, default=str) + "\n")
        os.replace(unfinished, self.path)


def row_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a row of the file as text: its times, then its ratios and notes."""
    times = "  ".join(f"{name} {_text(value)}" for name, value in row["variants"].items())
    yield f"{row['name']}: {times}"
    for name, ratio in row["ratios"].items():
        spread = f" [{' to '.join(map(_text, ratio['spread']))}]" if "spread" in ratio else ""
        yield f"    {name} = {_text(ratio['value'])}{spread}"
    for name, note in row.get("notes", {}).items():
        yield f"    {name}: {note!s:.200}"


def _ratio(value: Spread | float) -> dict[str, Any]:
    if isinstance(value, Spread):
        return {"value": _short(value.median), "spread": [_short(value.low), _short(value.high)]}
    return {"value": _short(value)}


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None  # JSON has no NaN


def _text(value: float | None) -> str:
    return "NaN" if value is None else f"{value:g}"
