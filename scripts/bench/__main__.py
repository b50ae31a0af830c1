"""Measure the project on a CPU or an NVIDIA GPU, as ratios inside one run.

    make bench                          all workloads on the CPU
    make gpu GPU='--only kernels plan'  some on a GPU
    PYTHONPATH=src python3 -m trt_lora.scripts.bench gpu --output FOLDER    without make

Writes one JSON file: the machine, then every row as it comes. A workload for which a package is
missing says so, and the others run. Exits with 2 where the GPU is missing, and with 1 if a workload
failed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trt_lora.plugins.errors import BackendError, ConfigError
from trt_lora.runtime.memory.cuda import call, cuda_obstacle
from trt_lora.runtime.memory.tensor import HOST
from trt_lora.scripts.bench.workload_list import CPU, GPU
from trt_lora.scripts.measuring.machine import checkout, machine_of
from trt_lora.scripts.measuring.report import Report
from trt_lora.scripts.measuring.runner import Runner
from trt_lora.scripts.measuring.worker import Workload
from trt_lora.scripts.terminal.console import run

ROOT = Path(__file__).resolve().parents[2]  # of the checkout
FOLDER = ROOT / "docs" / "benchmarks"
WORKLOADS = {"cpu": CPU, "gpu": GPU}
MINUTES = {"cpu": 15.0, "gpu": 7.0}  # the last row may go on for most of another one
FIRST = "compilation"  # the others find the kernels in the disk cache


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    result = argparse.ArgumentParser(prog="bench", description=(__doc__ or "").splitlines()[0])
    add = result.add_argument
    add("device", choices=sorted(WORKLOADS), help="where to measure")
    add("--only", nargs="+", metavar="NAME", help="workloads, such as plan (default: all)")
    add("--minutes", type=float, help="for all of them together (default: 15, on a GPU 7)")
    add(
        "--output",
        type=Path,
        metavar="PATH",
        help="file, or folder for <device>-*.json that exists (default: docs/benchmarks)",
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status.

    Raises:
        BackendError: a GPU is asked for, and there is none.
        ConfigError: a workload is not known.
    """
    start, args = time.monotonic(), parser().parse_args(arguments)
    workloads = chosen(WORKLOADS[args.device], args.only)
    device = _gpu() if args.device == "gpu" else HOST
    machine = machine_of(device)
    name = f"{args.device}-{slug(machine['gpu' if args.device == 'gpu' else 'cpu'])}.json"
    output = args.output or FOLDER
    report = Report(output / name if output.is_dir() else output)
    report.put(machine=machine, checkout=checkout(ROOT), date=time.strftime("%Y-%m-%d"))
    minutes = MINUTES[args.device] if args.minutes is None else args.minutes
    succeeded = Runner(report, start + 60 * minutes).run(workloads)
    report.put(seconds=round(time.monotonic() - start, 1))
    print(f"\nall numbers: {report.path}")
    return 0 if succeeded else 1


def chosen(workloads: Sequence[Workload], only: Sequence[str] | None) -> list[Workload]:
    """Return the workloads named, in their own order, or all; `correctness` names all its parts.

    Raises:
        ConfigError: there is none of that name.
    """
    if not only:
        return list(workloads)
    names = {name for workload in workloads for name in _names(workload)}
    if unknown := set(only) - names:
        raise ConfigError(
            f"--only {' '.join(sorted(unknown))}: unknown; choose from: {', '.join(sorted(names))}"
        )
    wanted = {*only, FIRST}
    return [workload for workload in workloads if not wanted.isdisjoint(_names(workload))]


def slug(device: str) -> str:
    """Return a device's name as part of a file name: `nvidia-h200`."""
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


def _names(workload: Workload) -> tuple[str, str]:
    return workload.name, workload.name.partition(":")[0]


def _gpu() -> str:
    """The current GPU, as `Tensor.device` names it."""
    if obstacle := cuda_obstacle():
        raise BackendError(f"no benchmark without an NVIDIA GPU: {obstacle}")
    return f"cuda:{int(call('cudaGetDevice'))}"


if __name__ == "__main__":
    run(lambda: sys.exit(main()))
