"""Compile all LoRA kernels for the GPU in parallel, into the disk cache.

Later processes load them from there. A kernel that the compiler refuses, or ends on, is a row.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.nvrtc import KERNELS, SLOT_KERNELS, architecture_of, compile_lora
from trt_lora.scripts.bench.gpu.gpu_tests import current_chip
from trt_lora.scripts.measuring.report import ResultRow

ALL = (*KERNELS, *SLOT_KERNELS)


def rows(chip: Chip | None = None, kernels: Sequence[str] = ALL) -> Iterator[ResultRow]:
    """Compile for a chip, by default the current GPU; a row for every kernel, as it comes.

    Raises:
        BackendError: at the end, if one was refused; it names them.
    """
    chip = chip or current_chip()
    refused = []
    arch = architecture_of(chip)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(kernels), os.cpu_count() or 1), mp_context=context) as pool:
        futures = {pool.submit(seconds_to_compile, arch, kernel): kernel for kernel in kernels}
        for future in as_completed(futures):
            row = _row(futures[future], future)
            refused += [row.name] * ("refused" in row.notes)
            yield row
    if refused:
        raise BackendError(f"not compiled for {arch}: {', '.join(sorted(refused))}")


def seconds_to_compile(arch: str, kernel: str) -> float:
    """Compile one kernel into the disk cache."""
    start = time.perf_counter()
    compile_lora(arch, (kernel,))
    return time.perf_counter() - start


def _row(kernel: str, future: Future[float]) -> ResultRow:
    if error := future.exception():  # also of a compiler that ended its process
        return ResultRow(kernel, {}, notes={"refused": f"{error!r:.1000}"})
    return ResultRow(kernel, {}, {"compile, s": future.result()})
