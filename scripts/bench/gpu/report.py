"""JSON report of a run: rows beside their predictions."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trt_lora.scripts.measuring.turns import Spread


@dataclass(frozen=True)
class Expectation:
    """Prediction of a number, stated before it was measured."""

    low: float | None = None  # the prediction's two ends
    high: float | None = None
    at_most: float | None = None  # the target, where there is one
    at_least: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the prediction and the target."""
        result: dict[str, Any] = {}
        if self.low is not None and self.high is not None:
            result["prediction"] = [_short(self.low), _short(self.high)]
        if self.at_most is not None:
            result["target"] = f"at most {self.at_most:g}"
        if self.at_least is not None:
            result["target"] = f"at least {self.at_least:g}"
        return result

    def compare_with_prediction(self, value: float) -> dict[str, Any]:
        """Return the same with the gap to the prediction and whether the target was met."""
        result = self.to_json()
        if self.low is not None and self.high is not None:
            gap = value - min(max(value, self.low), self.high)  # 0 inside the prediction
            result["gap"] = _short(gap)
        if self.at_most is not None or self.at_least is not None:
            result["met"] = (self.at_most is None or value <= self.at_most) and (
                self.at_least is None or value >= self.at_least
            )
        return result


# By row, and in it by ratio.
Expectations = Mapping[str, Mapping[str, Expectation]]


@dataclass(frozen=True)
class ResultRow:
    """One cell of a workload: what each version took, and the ratios between them."""

    name: str
    sizes: Mapping[str, Any]
    variants: Mapping[str, float] = field(default_factory=dict)  # with the unit in the name
    ratios: Mapping[str, Spread | float] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, expected: Mapping[str, Expectation]) -> dict[str, Any]:
        """Return the row with every ratio beside what was expected of it."""
        ratios = {
            name: _ratio_json(value)
            | expected.get(name, Expectation()).compare_with_prediction(_median(value))
            for name, value in self.ratios.items()
        }
        result: dict[str, Any] = {"name": self.name, "sizes": dict(self.sizes)}
        result["variants"] = {name: _short(value) for name, value in self.variants.items()}
        result["ratios"] = ratios
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


def _median(value: Spread | float) -> float:
    return value.median if isinstance(value, Spread) else value


def _ratio_json(value: Spread | float) -> dict[str, Any]:
    if isinstance(value, Spread):
        return {"value": _short(value.median), "spread": [_short(value.low), _short(value.high)]}
    return {"value": _short(value)}


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None  # JSON has no NaN
