"""The GPU, and TensorRT-RTX on it, for tests that need them."""

import pytest
from gpu.tensorrt_probe import Answer, ask
from kernels.calls import Sizes

from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.runtime.memory.cuda import cuda_obstacle
from trt_lora.scripts.bench.gpu.gpu_tests import FAMILIES, REST, current_chip, kernel_family


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make gpu` runs every kernel family in a process of its own."""
    parser.addoption("--kernels", help=f"one of {', '.join(FAMILIES)}, or {REST}: all other tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of one family, or those of none."""
    part = config.getoption("--kernels", None)
    if part is None or cuda_obstacle():  # they skip themselves
        return
    chip = current_chip()
    kept = [item for item in items if _part(item, chip) == part]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _part(item: pytest.Item, chip: Chip) -> str:
    call = getattr(item, "callspec", None)
    sizes = call.params.get("sizes") if call else None
    return (
        kernel_family(sizes.shape, chip, aligned=sizes.aligned)
        if isinstance(sizes, Sizes)
        else REST
    )


@pytest.fixture(scope="session")
def gpu() -> Chip:
    """The current GPU, with a CUDA context."""
    if obstacle := cuda_obstacle():
        pytest.skip(obstacle)
    return current_chip()


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
