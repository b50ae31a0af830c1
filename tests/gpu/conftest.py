"""The GPU, and TensorRT-RTX on it, for tests that need them."""

import pytest

from trt_lora.plugins.launch import Chip
from trt_lora.runtime.cuda import call, cuda_obstacle
from trt_lora.scripts.bench.gpu.workloads.tensorrt_probe import Answer, ask


@pytest.fixture(scope="session")
def gpu() -> Chip:
    """The current GPU, with a CUDA context."""
    if obstacle := cuda_obstacle():
        pytest.skip(obstacle)
    call("cudaFree", call("cudaMalloc", 256))  # the context that the driver's calls ask for
    properties = call("cudaGetDeviceProperties", int(call("cudaGetDevice")))
    return Chip((properties.major, properties.minor), properties.multiProcessorCount)


@pytest.fixture(scope="session")
def tensorrt_answers(gpu: Chip) -> list[Answer]:
    """How far each flavour of TensorRT comes on this GPU."""
    return ask()


@pytest.fixture(scope="session")
def flavour(tensorrt_answers: list[Answer]) -> str:
    """A flavour of TensorRT that runs here."""
    running = [answer.flavour for answer in tensorrt_answers if answer.runs]
    if not running:
        pytest.skip("; ".join(f"{a.flavour}: {a.reason}" for a in tensorrt_answers))
    return running[0]
