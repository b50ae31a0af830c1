"""All workloads of the GPU benchmark, in order of worth: a deadline cuts the end."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from trt_lora.plugins.kernels import Kernels
from trt_lora.plugins.launch import Chip
from trt_lora.runtime.device_memory import CudaMemory
from trt_lora.scripts.gpu import (
    ceilings,
    engine_workload,
    gpu_tests,
    kernel_compilation,
    kernel_correctness,
    kernel_workload,
    load_workload,
    step_workload,
    switch_workload,
    tensorrt,
)
from trt_lora.scripts.gpu.bench import Bench, Options
from trt_lora.scripts.gpu.device import CudaDevice
from trt_lora.scripts.gpu.raw_memory import CudaRawMemory
from trt_lora.scripts.gpu.results import ResultRow
from trt_lora.scripts.gpu.worker import Workload

Rows = Iterator[ResultRow]


def gpu_workloads(options: Options) -> list[Workload]:
    """Return the workloads; nothing touches a GPU before their rows are asked for.

    The third value of each is its share of the time, in seconds where all need all of theirs.
    """
    return [
        Workload(
            "kernels",
            "Does every kernel compile?",
            20,
            partial(kernel_compilation.rows, options.chip),
        ),
        *_correctness(options.chip),
        Workload("tests", "Do the tests marked gpu pass?", 90, gpu_tests.rows),
        _decode_step("r16", step_workload.FIRST, 30, options),
        Workload("tensorrt", "Does TensorRT, or TensorRT-RTX, run here?", 20, tensorrt.rows),
        *_sweeps(options),
        *_serving(options),
    ]


def _correctness(chip: Chip) -> list[Workload]:
    return [
        Workload(
            f"correctness:{family}",
            "Are its results those of float64, and memory around them untouched?",
            12,
            partial(_check, family, chip),
        )
        for family in kernel_correctness.families(chip)
    ]


def _sweeps(options: Options) -> list[Workload]:
    return [
        Workload(
            "ceilings",
            "What do a node of a graph and a byte cost?",
            10,
            partial(on_gpu, ceilings.rows, options),
            ceilings.EXPECTATIONS,
        ),
        Workload(
            "lora-group",
            "What does a group of linears cost, in a graph?",
            70,
            partial(on_gpu, kernel_workload.rows, options),
            kernel_workload.expectations(options),
        ),
        _decode_step("sweep", step_workload.DECODE, 60, options),
        Workload(
            "engine-step",
            "What does LoRA add to a decode step inside an engine?",
            60,
            engine_workload.rows,
            engine_workload.expectations(),
        ),
        Workload(
            "prefill",
            "What does LoRA add to prefill?",
            45,
            partial(on_gpu, step_workload.prefill_rows, options),
            step_workload.prefill_expectations(options),
        ),
    ]


def _serving(options: Options) -> list[Workload]:
    return [
        Workload(
            "switch",
            "What does a switch cost?",
            15,
            partial(on_gpu, _switch, options),
            switch_workload.EXPECTATIONS,
        ),
        Workload(
            "load",
            "How fast is an adapter on the device?",
            40,
            partial(on_gpu, _load, options),
            load_workload.expectations(),
        ),
        Workload(
            "idle",
            "What does LoRA cost while there is no adapter?",
            10,
            partial(on_gpu, step_workload.idle_rows, options),
            step_workload.idle_expectations(options),
        ),
        Workload(
            "decode-step-compiled",
            "What does torch.compile make of LoRA in a decode step?",
            40,
            partial(on_gpu, step_workload.compiled_rows, options),
            step_workload.compiled_expectations(options),
        ),
    ]


def _decode_step(
    part: str, cells: tuple[step_workload.StepCell, ...], weight: float, options: Options
) -> Workload:
    return Workload(
        f"decode-step:{part}",
        "What does LoRA on all seven linears add to a decode step?",
        weight,
        partial(on_gpu, partial(step_workload.decode_rows, cells=cells), options),
        step_workload.decode_expectations(options, cells),
    )


def on_gpu(rows: Callable[[Bench], Rows], options: Options) -> Rows:
    """Yield the rows of a workload on the current GPU."""
    with torch.no_grad():
        yield from rows(Bench(CudaDevice(), options))


def _check(family: str, chip: Chip) -> Rows:
    return kernel_correctness.rows(family, chip, Kernels(), CudaRawMemory())


def _switch(bench: Bench) -> Rows:
    return switch_workload.rows(bench, CudaMemory())


def _load(bench: Bench) -> Rows:
    return load_workload.rows(bench, CudaMemory())
