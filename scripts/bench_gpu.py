"""Measure on an NVIDIA GPU what performance.md promises, as ratios inside one run.

    make gpu                            everything, in under 8 minutes
    python scripts/bench_gpu.py --only W1 W2 --vllm DIR --minutes 3

Writes one JSON file: the machine, the predictions before anything runs, then every workload as it
ends. Exits with 2 where there is no GPU, and with 1 if a workload failed.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.launch import Chip
from trt_lora.runtime.cuda import cuda_obstacle
from trt_lora.scripts.console import FAILED, run
from trt_lora.scripts.gpu.machine import describe_machine, slug
from trt_lora.scripts.gpu.results import Report
from trt_lora.scripts.gpu.run import Runner, Workload

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
MINUTES = 7.0  # the last row may go on for most of another one


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = result.add_argument
    add("--only", nargs="+", metavar="NAME", help="workloads, such as tests W1 W2 (default: all)")
    add("--minutes", type=float, default=MINUTES, help="for all of them together")
    add("--vllm", type=Path, metavar="DIR", help="vLLM's folder vllm/lora/ops/triton_ops")
    add("--output", type=Path, metavar="FILE", help="default: docs/benchmarks/gpu-<device>.json")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    start = time.monotonic()
    args = parser().parse_args(arguments)
    if obstacle := cuda_obstacle():
        print(f"no benchmark without an NVIDIA GPU: {obstacle}", file=sys.stderr)
        return FAILED
    torch = _torch()
    machine = describe_machine(ROOT)
    report = Report(args.output or FOLDER / f"gpu-{slug(machine['device'])}.json")
    report.put(machine=machine, date=time.strftime("%Y-%m-%d"), arguments=vars(args))
    with torch.no_grad():
        workloads = chosen(_workloads(machine, args.vllm), args.only)
        succeeded = Runner(report, start + 60 * args.minutes).run(workloads)
    report.put(seconds=round(time.monotonic() - start, 1))
    print(f"\nall numbers: {report.path}")
    return 0 if succeeded else 1


def _torch() -> ModuleType:
    """What the base's products and the peers run on; a machine without a GPU need not have it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(
            f"the benchmark needs torch ({error}); give make a Python that has it: "
            "make gpu PYTHON=python3"
        ) from error


def chosen(workloads: Sequence[Workload], only: Sequence[str] | None) -> list[Workload]:
    """Return the workloads named, or all.

    Raises:
        ConfigError: there is none of that name.
    """
    names = [workload.name for workload in workloads]
    if unknown := set(only or ()) - set(names):
        raise ConfigError(
            f"--only {' '.join(sorted(unknown))}: unknown; choose from: {', '.join(names)}"
        )
    return [workload for workload in workloads if not only or workload.name in only]


def _workloads(machine: Mapping[str, Any], vllm: Path | None) -> list[Workload]:
    from trt_lora.scripts.gpu.bench import Options
    from trt_lora.scripts.gpu.vllm import installed_vllm
    from trt_lora.scripts.gpu.workloads import gpu_workloads

    major, minor = map(int, machine["compute capability"].split("."))
    chip = Chip((major, minor), machine["multiprocessors"])
    l2_bytes = machine["level-2 cache, bytes"]
    return gpu_workloads(Options(vllm=vllm or installed_vllm(), chip=chip, l2_bytes=l2_bytes))


if __name__ == "__main__":
    run(lambda: sys.exit(main()))
