"""Run workloads one by one, each in a subprocess with a deadline.

Nothing that a workload does reaches the others: an illegal address, which ends a process's CUDA
context for good, an abort of a library or a hang costs the workload's further rows alone.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trt_lora.scripts.measuring.report import Report, row_lines
from trt_lora.scripts.measuring.worker import Workload, WorkloadOutcome, work

GRACE_SECONDS = 60.0  # to start, and to end the row that was begun in time
_FAREWELL_SECONDS = 2.0
_LOG_LINES = 40


def say(line: str) -> None:
    """Print now, also where the output is a pipe."""
    print(line, flush=True)


@dataclass
class Runner:
    """Gives every workload its share of what is left, so that time saved early is not lost."""

    report: Report
    deadline: float  # of `time.monotonic`
    grace_seconds: float = GRACE_SECONDS
    tell: Callable[[str], None] = say

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
        self.tell(f"\n{workload.name}: {workload.question}")
        if seconds > 0:
            result |= self._in_a_process(workload, seconds, rows)
        else:
            result["outcome"] = WorkloadOutcome.OUT_OF_TIME
        if result["outcome"] not in (WorkloadOutcome.DONE, WorkloadOutcome.OUT_OF_TIME):
            self.tell(f"  {result['outcome']}: {result.get('reason', '')}")
        result["seconds"] = round(time.monotonic() - start, 1)
        self.report.put()

    def _in_a_process(self, workload: Workload, seconds: float, rows: list[Any]) -> dict[str, Any]:
        """Collect rows, each on disk as it comes; return the outcome, whatever it is."""
        context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
        receiver, sender = context.Pipe(duplex=False)
        with TemporaryDirectory() as scratch, receiver:
            log = Path(scratch) / "log"
            log.touch()
            process = context.Process(target=work, args=(workload, seconds, log, sender))
            process.start()
            sender.close()  # so that the pipe ends with the process
            deadline = time.monotonic() + seconds + self.grace_seconds
            try:
                result = self._receive(receiver, deadline, rows)
            finally:
                _end(process)
            if result["outcome"] == WorkloadOutcome.CRASHED:
                result["reason"] = f"its process ended with {_ending(process)}"
            if result["outcome"] in (WorkloadOutcome.CRASHED, WorkloadOutcome.HUNG):
                result["output"] = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            return result

    def _receive(self, receiver: Connection, deadline: float, rows: list[Any]) -> dict[str, Any]:
        """Take rows until the process sends its outcome, dies or is late."""
        try:
            while receiver.poll(max(deadline - time.monotonic(), 0)):
                message: dict[str, Any] = receiver.recv()
                if "row" not in message:
                    return message
                rows.append(message["row"])
                self.report.put()
                for line in row_lines(rows[-1]):
                    self.tell(f"  {line}")
        except (EOFError, ConnectionError):
            return {"outcome": WorkloadOutcome.CRASHED}
        return {"outcome": WorkloadOutcome.HUNG, "reason": "not ended by its deadline: killed"}


def _end(process: BaseProcess) -> None:
    """Wait a moment, then end the process, and with it all that it started."""
    assert process.pid is not None  # it was started
    process.join(_FAREWELL_SECONDS)
    if process.is_alive():
        os.kill(process.pid, signal.SIGABRT)  # it writes down where it is
        process.join(_FAREWELL_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # nothing is left of its group
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _ending(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
