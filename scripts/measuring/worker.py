"""Workloads of the benchmark, and the subprocess that runs one and sends its rows."""

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trt_lora.plugins.errors import LoRAError
from trt_lora.scripts.measuring.child import imported, parent

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
        """True if it has to be looked at."""
        return self not in (self.DONE, self.OUT_OF_TIME, self.SKIPPED)


@dataclass(frozen=True)
class Workload:
    """One question, and what yields the `ResultRow`s that answer it."""

    name: str  # with parts as `correctness:fused`
    question: str
    weight: float  # its share of the time, beside the others'
    place: str  # MODULE:FUNCTION, imported by the process that runs it
    arguments: tuple[object, ...] = ()  # of the function, as JSON takes them


def main() -> None:
    """Send every row of PLACE, and last the outcome; no row is begun later than SECONDS."""
    place, arguments, seconds = sys.argv[1:]
    deadline = time.monotonic() + float(seconds)
    faulthandler.enable()
    send = parent()
    send(_run(place, json.loads(arguments), deadline, send))


def _run(
    place: str,
    arguments: Sequence[object],
    deadline: float,
    send: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    try:
        for row in imported(place)(*arguments):
            send({"row": row.to_json()})
            if time.monotonic() >= deadline:
                return {"outcome": WorkloadOutcome.OUT_OF_TIME}
    except Skipped as reason:
        return {"outcome": WorkloadOutcome.SKIPPED, "reason": str(reason)}
    except Exception as error:  # whatever it is, it is this workload's result
        if (missing := _missing_package(error)) is not None:
            return {"outcome": WorkloadOutcome.SKIPPED, "reason": f"{missing} is not installed"}
        lines = traceback.format_exc().splitlines()[-12:]
        return {"outcome": _outcome_of(error), "reason": repr(error), "traceback": lines}
    return {"outcome": WorkloadOutcome.DONE}


def _missing_package(error: Exception) -> str | None:
    """The name of what a machine lacks; a module of our own is none."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    name = (error.name or "").partition(".")[0]
    return name if name not in ("", "trt_lora") else None


def _outcome_of(error: Exception) -> WorkloadOutcome:
    if any(sign in str(error).lower() for sign in _SIGNS_OF_AN_ILLEGAL_ADDRESS):
        return WorkloadOutcome.ILLEGAL_ADDRESS
    if isinstance(error, WrongResultError):
        return WorkloadOutcome.WRONG
    if isinstance(error, LoRAError):
        return WorkloadOutcome.REFUSED
    return WorkloadOutcome.RAISED
