"""All workloads of the GPU benchmark, in the order in which they run."""

import functools
from collections.abc import Callable, Iterator

from trt_lora.runtime.device_memory import CudaMemory
from trt_lora.scripts.gpu import checks as checks
from trt_lora.scripts.gpu import engine_workload as engine
from trt_lora.scripts.gpu import kernel_workload as kernel
from trt_lora.scripts.gpu import load_workload as load
from trt_lora.scripts.gpu import step_workload as step
from trt_lora.scripts.gpu import switch_workload as switch
from trt_lora.scripts.gpu.bench import Bench, Options
from trt_lora.scripts.gpu.device import CudaDevice
from trt_lora.scripts.gpu.results import Row
from trt_lora.scripts.gpu.run import Skipped, Workload
from trt_lora.scripts.gpu.tensorrt import Answer, ask

Answers = Callable[[], list[Answer]]


def gpu_workloads(options: Options) -> list[Workload]:
    """Return the workloads for the current GPU; nothing runs before their rows are asked for.

    The third value of each is its share of the time, in seconds where all need all of theirs.
    """
    bench = functools.cache(lambda: Bench(CudaDevice(), options))
    answers = functools.cache(ask)
    return [
        *_checks(options, bench, answers),
        *_decoding(options, bench, answers),
        *_serving(options, bench),
    ]


def _checks(options: Options, bench: Callable[[], Bench], answers: Answers) -> list[Workload]:
    return [
        Workload(
            "ceilings",
            "What do a node of a graph and a byte cost?",
            10,
            lambda: checks.ceiling_rows(bench()),
            checks.CEILINGS,
        ),
        Workload(
            "tensorrt",
            "Does TensorRT, or TensorRT-RTX, run on this chip?",
            20,
            lambda: checks.tensorrt_rows(answers),
        ),
        Workload(
            "tests",
            "Do the tests marked gpu pass, every kernel against float64 among them?",
            90,
            checks.suite_rows,
        ),
    ]


def _decoding(options: Options, bench: Callable[[], Bench], answers: Answers) -> list[Workload]:
    return [
        Workload(
            "W1",
            "What does a group of linears cost, in a graph?",
            80,
            lambda: kernel.rows(bench()),
            kernel.expectations(options),
        ),
        Workload(
            "W2",
            "What does LoRA on all seven linears add to a decode step?",
            80,
            lambda: step.decode_rows(bench()),
            step.decode_expectations(options),
        ),
        Workload(
            "W3",
            "And inside an engine?",
            60,
            lambda: engine.rows(answers()),
            engine.expectations(),
        ),
        Workload(
            "W4",
            "And to prefill?",
            45,
            lambda: step.prefill_rows(bench()),
            step.prefill_expectations(options),
        ),
    ]


def _serving(options: Options, bench: Callable[[], Bench]) -> list[Workload]:
    return [
        Workload("W5", "And where every row has its own adapter?", 1, _no_slots),
        Workload(
            "W6",
            "What does a switch cost?",
            15,
            lambda: switch.rows(bench(), CudaMemory()),
            switch.EXPECTATIONS,
        ),
        Workload(
            "W7",
            "How fast is an adapter on the device?",
            40,
            lambda: load.rows(bench(), CudaMemory()),
            load.expectations(),
        ),
        Workload(
            "W8",
            "What does LoRA cost while there is no adapter?",
            10,
            lambda: step.idle_rows(bench()),
            step.idle_expectations(options),
        ),
        Workload(
            "W2c",
            "And with torch.compile?",
            40,
            lambda: step.compiled_rows(bench()),
            step.compiled_expectations(options),
        ),
    ]


def _no_slots() -> Iterator[Row]:
    raise Skipped("not built yet: slots mode")
