"""All workloads of the GPU benchmark, most important first: a deadline cuts the end."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.scripts.bench.gpu.device import CudaDevice
from trt_lora.scripts.bench.gpu.report import ResultRow
from trt_lora.scripts.bench.gpu.session import Bench, Options
from trt_lora.scripts.bench.gpu.worker import Workload
from trt_lora.scripts.bench.gpu.workloads import (
    adapter_load,
    adapter_switch,
    ceilings,
    decode_step,
    engine_step,
    gpu_tests,
    kernel_compilation,
    lora_group,
    mixed_rows,
    slot_switch,
    tensorrt_probe,
)

Rows = Iterator[ResultRow]


def gpu_workloads(options: Options) -> list[Workload]:
    """Return the workloads; nothing touches a GPU before their rows are asked for.

    The third value of each is its share of the time, in seconds where all need all of theirs.
    """
    return [
        Workload(
            "kernels",
            "Does every kernel compile?",
            40,
            partial(kernel_compilation.rows, options.chip),
        ),
        *_correctness(options.chip),
        Workload(
            "tests", "Do the tests marked gpu pass?", 90, partial(gpu_tests.rows, gpu_tests.REST)
        ),
        _decode_step("r16", decode_step.FIRST, 30, options),
        Workload("tensorrt", "Does TensorRT, or TensorRT-RTX, run here?", 20, tensorrt_probe.rows),
        *_sweeps(options),
        *_serving(options),
    ]


def _correctness(chip: Chip) -> list[Workload]:
    return [
        Workload(
            f"correctness:{family}",
            "Are its results those of float64, and memory around them untouched?",
            12,
            partial(gpu_tests.rows, family),
        )
        for family in gpu_tests.families(chip)
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
            partial(on_gpu, lora_group.rows, options),
            lora_group.expectations(options),
        ),
        _decode_step("sweep", decode_step.DECODE, 60, options),
        *_mixed(options),
        Workload(
            "engine-step",
            "What does LoRA add to a decode step inside an engine?",
            60,
            engine_step.rows,
            engine_step.expectations(),
        ),
        Workload(
            "prefill",
            "What does LoRA add to prefill?",
            45,
            partial(on_gpu, decode_step.prefill_rows, options),
            decode_step.prefill_expectations(options),
        ),
    ]


def _mixed(options: Options) -> list[Workload]:
    return [
        Workload(
            "mixed-rows",
            "What does a group cost whose rows take adapters of their own?",
            60,
            partial(on_gpu, mixed_rows.rows, options),
            mixed_rows.expectations(options),
        ),
        Workload(
            "slot-switch",
            "What do other adapters cost the rows of a captured graph?",
            10,
            partial(on_gpu, slot_switch.rows, options),
            slot_switch.EXPECTATIONS,
        ),
    ]


def _serving(options: Options) -> list[Workload]:
    return [
        Workload(
            "switch",
            "What does a switch cost?",
            15,
            partial(on_gpu, _switch, options),
            adapter_switch.EXPECTATIONS,
        ),
        Workload(
            "load",
            "How fast is an adapter on the device?",
            40,
            partial(on_gpu, _load, options),
            adapter_load.expectations(),
        ),
        Workload(
            "idle",
            "What does LoRA cost while there is no adapter?",
            10,
            partial(on_gpu, decode_step.idle_rows, options),
            decode_step.idle_expectations(options),
        ),
        Workload(
            "decode-step-compiled",
            "What does torch.compile make of LoRA in a decode step?",
            40,
            partial(on_gpu, decode_step.compiled_rows, options),
            decode_step.compiled_expectations(options),
        ),
    ]


def _decode_step(
    part: str, cells: tuple[decode_step.StepCell, ...], weight: float, options: Options
) -> Workload:
    return Workload(
        f"decode-step:{part}",
        "What does LoRA on all seven linears add to a decode step?",
        weight,
        partial(on_gpu, partial(decode_step.decode_rows, cells=cells), options),
        decode_step.decode_expectations(options, cells),
    )


def on_gpu(rows: Callable[[Bench], Rows], options: Options) -> Rows:
    """Yield the rows of a workload on the current GPU."""
    with torch.no_grad():
        yield from rows(Bench(CudaDevice(), options))


def _switch(bench: Bench) -> Rows:
    return adapter_switch.rows(bench, CudaMemory())


def _load(bench: Bench) -> Rows:
    return adapter_load.rows(bench, CudaMemory())
