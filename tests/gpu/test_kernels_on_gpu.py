"""The kernels on a GPU: against float64, inside a captured graph, and side by side."""

from collections.abc import Callable

import numpy as np
import pytest
from kernels.call_buffers import CallBuffers
from kernels.calls import Sizes, checked_sizes, random_call
from kernels.guarded_buffer import CudaMemory, Guarded

from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape, SiteShape
from trt_lora.plugins.kernels.launch_plan import Chip, plan_launches, workspace_bytes
from trt_lora.plugins.kernels.launcher import Kernels
from trt_lora.runtime.memory.cuda import call, constant
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.bench.gpu.gpu_tests import WORST

pytestmark = pytest.mark.gpu

M, K, N, RANK = 4, 512, 768, 16
SHAPE = GroupShape(M, K, (SiteShape(N, RANK),), "float32", has_addend=False)


@pytest.mark.parametrize("sizes", list(checked_sizes()), ids=lambda sizes: sizes.name)
def test_a_call_agrees_with_float64_and_repeats_its_bits(
    gpu: Chip, record_property: Callable[[str, object], None], sizes: Sizes
) -> None:
    work = random_call(sizes.shape)
    with CallBuffers(work, CudaMemory(), shift=sizes.shift) as buffers:
        outputs, again = (
            buffers.run(lambda placed: Kernels().launch(sizes.shape, placed, 0)) for _ in range(2)
        )
    worst = work.worst(outputs)
    launches = plan_launches(sizes.shape, gpu, aligned=sizes.aligned)
    record_property("kernels", " + ".join(each.kernel for each in launches))
    record_property(WORST, worst)
    assert worst <= 1
    for one, other in zip(outputs, again, strict=True):
        assert one.tobytes() == other.tobytes()


class Call:
    """One call whose x can be changed."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.a, self.b = (
            rng.standard_normal(shape).astype(np.float32) for shape in ((K, RANK), (RANK, N))
        )
        memory = CudaMemory()
        self._x = Guarded(memory, M * K * 4)
        self._a, self._b = (Guarded(memory, each.nbytes, each) for each in (self.a, self.b))
        self._out = Guarded(memory, M * N * 4)
        self._workspace = Guarded(memory, workspace_bytes(SHAPE))
        self._memory = memory

    def launch(self, stream: int) -> None:
        out, workspace = (self._out.address,), self._workspace.address
        a, b = (self._a.address,), (self._b.address,)
        buffers = GroupBuffers(self._x.address, a, b, (), out, workspace)
        Kernels().launch(SHAPE, buffers, stream)

    def put(self, x: Array) -> None:
        self._out.reset()
        self._memory.write(self._x.address, x)

    def result(self) -> Array:
        return self._out.read().view(np.float32).reshape(M, N)

    def free(self) -> None:
        for each in (self._x, self._a, self._b, self._out, self._workspace):
            each.free()


def test_a_captured_call_computes_again_on_what_x_holds_then(gpu: Chip) -> None:
    work = Call()
    stream = int(call("cudaStreamCreate"))
    work.launch(stream)  # loads the kernel, which a capture could not
    call("cudaStreamSynchronize", stream)
    call(
        "cudaStreamBeginCapture",
        stream,
        constant("cudaStreamCaptureMode").cudaStreamCaptureModeThreadLocal,
    )
    work.launch(stream)
    graph = call("cudaStreamEndCapture", stream)
    launchable = call("cudaGraphInstantiate", graph, 0)
    try:
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal((M, K)).astype(np.float32)
            work.put(x)
            call("cudaGraphLaunch", launchable, stream)
            call("cudaStreamSynchronize", stream)
            expected = x.astype(np.float64) @ work.a @ work.b
            np.testing.assert_allclose(work.result(), expected, rtol=1e-3, atol=1e-2)
    finally:
        call("cudaGraphExecDestroy", launchable)
        call("cudaGraphDestroy", graph)
        call("cudaStreamDestroy", stream)
        work.free()


def test_calls_on_two_streams_at_a_time_do_not_disturb_each_other(gpu: Chip) -> None:
    works = [Call(), Call()]
    streams = [int(call("cudaStreamCreate")) for _ in works]
    x = np.random.default_rng(0).standard_normal((M, K)).astype(np.float32)
    for work in works:
        work.put(x)
    call("cudaDeviceSynchronize")
    for _ in range(50):
        for work, stream in zip(works, streams, strict=True):
            work.launch(stream)
    call("cudaDeviceSynchronize")
    one, other = (work.result() for work in works)
    expected = x.astype(np.float64) @ works[0].a @ works[0].b
    np.testing.assert_allclose(one, expected, rtol=1e-3, atol=1e-2)
    assert one.tobytes() == other.tobytes()
    for work, stream in zip(works, streams, strict=True):
        call("cudaStreamDestroy", stream)
        work.free()
