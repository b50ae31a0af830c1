"""Run workloads one after another: each with a deadline, each recorded as it goes, none fatal."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trt_lora.scripts.gpu.results import Expectations, Report, Row


class Skipped(Exception):  # noqa: N818
    """A workload cannot run on this machine; that is a result and no failure."""


@dataclass(frozen=True)
class Workload:
    """One question, the rows that answer it, and what is expected of them."""

    name: str
    question: str
    weight: float  # its share of the time, beside the others'
    rows: Callable[[], Iterator[Row]]
    expected: Expectations = field(default_factory=dict)


def say(line: str) -> None:
    """Print now, also where the output is a pipe."""
    print(line, flush=True)


@dataclass
class Runner:
    """Gives every workload its share of what is left, so that time saved early is not lost."""

    report: Report
    deadline: float  # on `clock`
    clock: Callable[[], float] = time.monotonic
    tell: Callable[[str], None] = say

    def run(self, workloads: Sequence[Workload]) -> bool:
        """Run all; return whether none failed."""
        self.report.put(predictions={w.name: _predicted(w) for w in workloads})
        results: dict[str, Any] = {}
        self.report.put(workloads=results)
        for index, workload in enumerate(workloads):
            share = workload.weight / sum(w.weight for w in workloads[index:])
            now = self.clock()
            self._run(workload, now + max(self.deadline - now, 0) * share, results)
        return all(result["status"] != "failed" for result in results.values())

    def _run(self, workload: Workload, deadline: float, results: dict[str, Any]) -> None:
        start = self.clock()
        rows: list[Any] = []
        result: dict[str, Any] = {"question": workload.question, "status": "running", "rows": rows}
        results[workload.name] = result
        self.tell(f"\n{workload.name}: {workload.question}")
        try:
            result["status"] = self._collect(workload, deadline, rows)
        except Skipped as reason:
            result |= {"status": "skipped", "reason": str(reason)}
            self.tell(f"  skipped: {reason}")
        except Exception as error:  # one workload's fault must not cost the others' results
            result |= {"status": "failed", "error": repr(error)}
            result["traceback"] = traceback.format_exc().splitlines()[-12:]
            self.tell(f"  failed: {error!r}")
        reached = {row["name"] for row in rows}
        result["not_reached"] = [name for name in workload.expected if name not in reached]
        result["seconds"] = round(self.clock() - start, 1)
        self.report.put()

    def _collect(self, workload: Workload, deadline: float, rows: list[Any]) -> str:
        source = workload.rows()
        while self.clock() < deadline:
            row = next(source, None)
            if row is None:
                return "done"
            rows.append(row.to_json(workload.expected.get(row.name, {})))
            for line in row_lines(rows[-1]):
                self.tell(f"  {line}")
            self.report.put()
        return "stopped at its deadline"


def row_lines(row: dict[str, Any]) -> Iterator[str]:
    """Yield a row as text: its times, then every ratio beside its prediction."""
    times = "  ".join(f"{name} {_text(value)}" for name, value in row["variants"].items())
    yield f"{row['name']}: {times}"
    for name, ratio in row["ratios"].items():
        yield "    " + "; ".join(_parts(name, ratio))
    for name, note in row.get("notes", {}).items():
        yield f"    {name}: {note!s:.200}"


def _parts(name: str, ratio: dict[str, Any]) -> Iterator[str]:
    spread = f" [{' to '.join(map(_text, ratio['spread']))}]" if "spread" in ratio else ""
    yield f"{name} = {_text(ratio['value'])}{spread}"
    if "prediction" in ratio:
        low, high = map(_text, ratio["prediction"])
        yield f"predicted {low} to {high}, gap {_text(ratio['gap'])}"
    if "target" in ratio:
        yield f"target {ratio['target']}: {'met' if ratio['met'] else 'MISSED'}"


def _text(value: float | None) -> str:
    return "NaN" if value is None else f"{value:g}"


def _predicted(workload: Workload) -> dict[str, Any]:
    return {
        row: {name: each.to_json() for name, each in expected.items()}
        for row, expected in workload.expected.items()
    }
