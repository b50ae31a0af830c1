"""Workloads of the benchmark, and the subprocess that runs one and streams its rows."""

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import LoRAError
from trt_lora.scripts.measuring.report import ResultRow

_SIGNS_OF_AN_ILLEGAL_ADDRESS = ("illegal memory access", "illegal address", "misaligned address")


class Skipped(Exception):  # noqa: N818
    """A workload cannot run on this machine; that is a result and no failure."""


class WrongResultError(RuntimeError):
    """Something computes what it should not."""


class WorkloadOutcome(StrEnum):
    """Outcome of a workload."""

    DONE = "done"
    OUT_OF_TIME = "out of time"  # between two rows: those that were reached stand
    SKIPPED = "skipped"
    REFUSED = "refused"  # one of our own errors: a library or the chip takes no such thing
    ILLEGAL_ADDRESS = "illegal address"  # a kernel read or wrote where nothing is
    WRONG = "wrong result"
    RAISED = "raised"  # any other exception
    CRASHED = "crashed"  # the process ended without a word
    HUNG = "hung"  # it did not end in time and was killed

    @property
    def is_failure(self) -> bool:
        """True if somebody has to look at it."""
        return self not in (self.DONE, self.OUT_OF_TIME, self.SKIPPED)


@dataclass(frozen=True)
class Workload:
    """One question, and the rows that answer it."""

    name: str  # with parts as `correctness:fused`
    question: str
    weight: float  # its share of the time, beside the others'
    rows: Callable[[], Iterator[ResultRow]]  # of a module's top level: another process calls it


def work(workload: Workload, seconds: float, log: Path, rows: Connection) -> None:
    """Send every row and, last, the outcome; the body of a workload's process.

    Args:
        workload: what to run.
        seconds: no row is begun later than this.
        log: what libraries print, and Python's stack where the process dies, is written there.
        rows: where rows go, as JSON; then one dictionary with the outcome.
    """
    os.setsid()  # one group with all that it starts, to be killed together
    _print_into(log)
    faulthandler.enable()
    with rows:
        rows.send(_run(workload, time.monotonic() + seconds, rows))


def _run(workload: Workload, deadline: float, rows: Connection) -> dict[str, Any]:
    try:
        for row in workload.rows():
            rows.send({"row": row.to_json()})
            if time.monotonic() >= deadline:
                return {"outcome": WorkloadOutcome.OUT_OF_TIME}
    except Skipped as reason:
        return {"outcome": WorkloadOutcome.SKIPPED, "reason": str(reason)}
    except Exception as error:  # whatever it is, it is this workload's result
        lines = traceback.format_exc().splitlines()[-12:]
        return {"outcome": _outcome_of(error), "reason": repr(error), "traceback": lines}
    return {"outcome": WorkloadOutcome.DONE}


def _outcome_of(error: Exception) -> WorkloadOutcome:
    if any(sign in str(error).lower() for sign in _SIGNS_OF_AN_ILLEGAL_ADDRESS):
        return WorkloadOutcome.ILLEGAL_ADDRESS
    if isinstance(error, WrongResultError):
        return WorkloadOutcome.WRONG
    if isinstance(error, LoRAError):
        return WorkloadOutcome.REFUSED
    return WorkloadOutcome.RAISED


def _print_into(log: Path) -> None:
    sys.stdout.flush()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
