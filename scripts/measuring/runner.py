"""Run workloads one by one, each in a subprocess with a deadline.

Nothing that a workload does reaches the others: an illegal address, which ends a process's CUDA
context for good, an abort of a library or a hang costs the workload's further rows alone.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trt_lora.scripts.measuring.child import ChildProcess
from trt_lora.scripts.measuring.report import Report, row_lines
from trt_lora.scripts.measuring.worker import Workload, WorkloadOutcome

GRACE_SECONDS = 60.0  # to start, and to end the row that was begun in time
_LOG_LINES = 40
_WORKER = "from trt_lora.scripts.measuring.worker import main; main()"


def print_now(line: str) -> None:
    """Print, also where the output is a pipe."""
    print(line, flush=True)


@dataclass
class Runner:
    """Gives every workload its share of what is left, so that time saved early is not lost."""

    report: Report
    deadline: float  # of `time.monotonic`
    grace_seconds: float = GRACE_SECONDS
    log: Callable[[str], None] = print_now

    def run(self, workloads: Sequence[Workload]) -> bool:
        """Run all; return whether none failed."""
        results: dict[str, Any] = {}
        self.report.put(workloads=results)
        for index, workload in enumerate(workloads):
            left = max(self.deadline - time.monotonic(), 0)
            share = workload.weight / sum(w.weight for w in workloads[index:])
            self._run(workload, left * share, results)
        return not any(WorkloadOutcome(r["outcome"]).is_failure for r in results.values())

    def _run(self, workload: Workload, seconds: float, results: dict[str, Any]) -> None:
        start = time.monotonic()
        rows: list[Any] = []
        result: dict[str, Any] = {"question": workload.question, "outcome": None, "rows": rows}
        results[workload.name] = result
        self.log(f"\n{workload.name}: {workload.question}")
        if seconds > 0:
            result |= self._in_a_process(workload, seconds, rows)
        else:
            result["outcome"] = WorkloadOutcome.OUT_OF_TIME
        if result["outcome"] not in (WorkloadOutcome.DONE, WorkloadOutcome.OUT_OF_TIME):
            self.log(f"  {result['outcome']}: {result.get('reason', '')}")
        result["seconds"] = round(time.monotonic() - start, 1)
        self.report.put()

    def _in_a_process(self, workload: Workload, seconds: float, rows: list[Any]) -> dict[str, Any]:
        """Collect rows, each on disk as it comes; return the outcome, whatever it is."""
        arguments = json.dumps(workload.arguments, default=str)
        command = [sys.executable, "-c", _WORKER, workload.place, arguments, seconds]
        with TemporaryDirectory() as scratch:
            with ChildProcess(command, Path(scratch, "log"), sys.path) as child:
                deadline = time.monotonic() + seconds + self.grace_seconds
                result = self._receive(child, deadline, rows)
            if result["outcome"] == WorkloadOutcome.CRASHED:
                result["reason"] = f"its process ended with {child.ending}"
            if result["outcome"] in (WorkloadOutcome.CRASHED, WorkloadOutcome.HUNG):
                result["output"] = child.last_lines(_LOG_LINES)
            return result

    def _receive(self, child: ChildProcess, deadline: float, rows: list[Any]) -> dict[str, Any]:
        """Take rows until the process sends its outcome, dies or is late."""
        try:
            while True:
                message = child.receive(deadline - time.monotonic())
                if "row" not in message:
                    return message
                rows.append(message["row"])
                self.report.put()
                for line in row_lines(rows[-1]):
                    self.log(f"  {line}")
        except EOFError:
            return {"outcome": WorkloadOutcome.CRASHED}
        except TimeoutError:
            return {"outcome": WorkloadOutcome.HUNG, "reason": "not ended by its deadline: killed"}
