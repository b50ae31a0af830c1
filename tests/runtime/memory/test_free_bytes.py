"""Free memory, of a GPU and of the host."""

from support.fakes.fake_cuda import FakeCuda

from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.host import HostMemory, free_host_memory


def test_free_memory_of_a_gpu_is_what_is_not_allocated(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    before = memory.free_bytes()
    kept = memory.zeros(1000)
    assert before - memory.free_bytes() >= kept.nbytes
    assert "cudaMemGetInfo" in cuda.names()


def test_free_memory_of_the_host_is_some_of_all() -> None:
    assert 0 < free_host_memory() < 1 << 50
    assert HostMemory().free_bytes() > 0
