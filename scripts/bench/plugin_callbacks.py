"""Time the plugin's callbacks of a decoder layer of Llama-3-8B's shapes; print JSON.

Run by cpu.py. The descriptions of tensors are TensorRT-RTX's own; the driver launches nothing, so
what is timed is the Python between TensorRT and the CUDA driver.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from time import process_time
from timeit import timeit
from types import SimpleNamespace
from typing import Any
from unittest import mock

from trt_lora.plugins import cuda_bindings
from trt_lora.plugins.contract.operators import Operator
from trt_lora.plugins.kernels import launcher
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.plugins.tensorrt.plugin_registry import LoraPlugins
from trt_lora.scripts.bench.gpu.model_shapes import LLAMA_3_8B, LinearShape

RANK = 16
ADDS = {"o", "down"}  # groups that add to the residual; the others return deltas
CALLS = 500  # in a round

HOST_DRIVER = SimpleNamespace(  # of one H200
    CUfunction=int,
    CUdevice_attribute=SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=132,
    ),
    cuInit=lambda flags: (0,),
    cuStreamGetDevice=lambda stream: (0, 0),
    cuDeviceGetAttribute=lambda attribute, device: (0, attribute),
    cuLibraryLoadData=lambda *_: (0, 1),
    cuLibraryGetKernel=lambda library, name: (0, 1),
    cuLaunchKernel=lambda *_: (0,),
)


class Step:
    """What TensorRT hands a node in a decode step of so many sequences."""

    def __init__(self, trt: Any, linears: Sequence[LinearShape], adds: bool, batch: int) -> None:
        outputs = [[batch, 1, linear.n] for linear in linears]
        factors = [shape for each in linears for shape in ([each.k, RANK], [RANK, each.n])]
        self.shapes = [[batch, 1, linears[0].k], *factors, *(outputs if adds else ())]
        self.inputs = [_described(trt, shape) for shape in self.shapes]
        described = [_described(trt, shape) for shape in outputs]
        first = 0x7F00_0000_0000
        addresses = [first + 256 * index for index in range(len(self.inputs))]
        self.told = self.inputs, described
        self.given = self.inputs, described, addresses, addresses[: len(outputs)], first, 7

    def read(self) -> bool:
        """Read and compare every dimension once, and do nothing else."""
        return [tensor.dims for tensor in self.inputs] == self.shapes


def measure(plugins: LoraPlugins, name: str, rounds: int) -> dict[str, float]:
    """Microseconds of a group's node: with equal dims, its parts, and after a change of dims."""
    linears, adds = LLAMA_3_8B.groups[name], name in ADDS
    node = plugins.make(Operator(len(linears), adds), name)
    one, two = (Step(plugins.trt, linears, adds, batch) for batch in (1, 2))

    tell, enqueue = node.on_shape_change, node.enqueue

    def run(step: Step) -> None:
        """Call both, as TensorRT does when an address or a shape has changed."""
        tell(*step.told)
        enqueue(*step.given)

    def change() -> None:
        run(two)
        run(one)

    change()  # compiles the kernel, and ends with the dims of the next calls
    calls: dict[str, Callable[[], object]] = {
        "both": partial(run, one),
        "on_shape_change": partial(tell, *one.told),
        "enqueue": partial(enqueue, *one.given),
        "reads": one.read,
        "both_changed": change,
    }
    # In turns and in CPU time, which a noisy neighbour lengthens less.
    seconds = [
        {what: timeit(call, timer=process_time, number=CALLS) for what, call in calls.items()}
        for _ in range(rounds)
    ]
    times = {what: min(each[what] for each in seconds) / CALLS * 1e6 for what in calls}
    return times | {"both_changed": times["both_changed"] / 2}


@contextmanager
def host_driver() -> Iterator[None]:
    """Let kernels be launched on `HOST_DRIVER` in the block."""
    real = cuda_bindings.bindings

    def bindings(name: str) -> Any:
        return HOST_DRIVER if name == "driver" else real(name)

    with ExitStack() as stack:
        for module in (cuda_bindings, launcher):
            stack.enter_context(mock.patch.object(module, "bindings", bindings))
        yield


def _described(trt: Any, shape: Sequence[int]) -> Any:
    description = trt.PluginTensorDesc()
    description.dims, description.type = trt.Dims(shape), trt.DataType.HALF
    return description


def main() -> None:
    """Run `ROUNDS`: print the best times of every group's node."""
    rounds = int(sys.argv[1])
    plugins = LoraPlugins(TENSORRT_RTX.load())
    with host_driver(), plugins.failures.collected() as failures:
        times = {name: measure(plugins, name, rounds) for name in LLAMA_3_8B.groups}
    if failures:
        raise SystemExit(failures[0])
    print(json.dumps(times))


if __name__ == "__main__":
    main()
