"""Check and measure LoRA on an NVIDIA GPU, as ratios inside one run; see docs/benchmarks/gpu.md.

    make gpu                            everything, in under 8 minutes
    make gpu GPU='--only lora-group decode-step --vllm DIR --minutes 3 --output FILE'

Writes one JSON file: the machine, the predictions before anything runs, then every row as it comes.
Exits with 2 where there is no GPU, and with 1 if a workload failed.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.runtime.memory.cuda import cuda_obstacle
from trt_lora.scripts.bench.gpu.machine import ROOT, describe_machine, slug
from trt_lora.scripts.bench.gpu.report import Report
from trt_lora.scripts.bench.gpu.runner import Runner
from trt_lora.scripts.bench.gpu.worker import Workload
from trt_lora.scripts.terminal.console import FAILED, run

FOLDER = ROOT / "docs" / "benchmarks"
COMPILATION = "kernels"  # the workload that the others build on
MINUTES = 7.0  # the last row may go on for most of another one


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = result.add_argument
    add("--only", nargs="+", metavar="NAME", help="workloads, as tests lora-group (default: all)")
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
    _check_torch()
    machine = describe_machine()
    report = Report(args.output or FOLDER / f"gpu-{slug(machine['device'])}.json")
    report.put(machine=machine, date=time.strftime("%Y-%m-%d"), arguments=vars(args))
    workloads = chosen(workloads_for(machine, args.vllm), args.only)
    succeeded = Runner(report, start + 60 * args.minutes).run(workloads)
    report.put(seconds=round(time.monotonic() - start, 1))
    print(f"\nall numbers: {report.path}")
    return 0 if succeeded else 1


def _check_torch() -> None:
    """The base's products and the peers run on it; a machine without a GPU need not have it."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the benchmark needs torch, which is not installed; give make a Python that has it: "
            "make gpu PYTHON=python3"
        )


def chosen(workloads: Sequence[Workload], only: Sequence[str] | None) -> list[Workload]:
    """Return the workloads named, in their own order, or all; `decode-step` names all its parts.

    Kernels are compiled first in any case: the others find them in the disk cache.

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
    wanted = {*only, COMPILATION}
    return [workload for workload in workloads if not wanted.isdisjoint(_names(workload))]


def _names(workload: Workload) -> tuple[str, str]:
    return workload.name, workload.name.partition(":")[0]


def workloads_for(machine: Mapping[str, Any], vllm: Path | None) -> list[Workload]:
    """Return all workloads, with what is predicted for this machine."""
    from trt_lora.scripts.bench.gpu.layers.vllm_kernels import installed_vllm
    from trt_lora.scripts.bench.gpu.session import Options  # it imports torch, which may be missing
    from trt_lora.scripts.bench.gpu.workload_list import gpu_workloads

    major, minor = map(int, machine["compute capability"].split("."))
    chip = Chip((major, minor), machine["multiprocessors"])
    l2_bytes = machine["level-2 cache, bytes"]
    return gpu_workloads(Options(vllm=vllm or installed_vllm(), chip=chip, l2_bytes=l2_bytes))


if __name__ == "__main__":
    run(lambda: sys.exit(main()))
