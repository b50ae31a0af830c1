"""Workloads that end in every way, for other processes to run."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from trt_lora.plugins.errors import BackendError
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.worker import Skipped, WrongResultError


def good(names: list[str], seconds: float = 0.0) -> Iterator[ResultRow]:
    """Yield rows, each after a while."""
    for name in names:
        time.sleep(seconds)
        yield ResultRow(name, {"pid": os.getpid()}, ratios={"us": 3.0})


def aborting() -> Iterator[ResultRow]:
    """End the process, as a library at odds with the driver does."""
    yield ResultRow("first", {})
    print("a library: terminate called without an active exception", file=sys.stderr, flush=True)
    os.abort()


def hanging(pids: str) -> Iterator[ResultRow]:
    """Never come back, and neither does a process that was started."""
    yield ResultRow("first", {})
    child = subprocess.Popen(["sleep", "600"])
    Path(pids).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    yield ResultRow("never", {})


def raising(kind: str) -> Iterator[ResultRow]:
    """Raise after a row."""
    yield ResultRow("first", {})
    raise {
        "address": RuntimeError("CUDA error: an illegal memory access was encountered"),
        "refused": BackendError("TensorRT-RTX refuses the plan on this GPU"),
        "wrong": WrongResultError("3 cases are wrong"),
        "skipped": Skipped("no TensorRT runs here"),
        "raised": KeyError("q_proj"),
    }[kind]
