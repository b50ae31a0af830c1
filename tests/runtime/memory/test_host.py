"""Host memory: what is zero takes none until it is written to."""

import numpy as np

from trt_lora.runtime.memory.host import HostMemory, host_buffer
from trt_lora.scripts.measuring.process_memory import resident_bytes

SIZE, FAR = 64 << 20, 2 << 20  # bytes; one in each FAR is written to


def test_sparse_zeros_take_the_memory_that_is_written_to() -> None:
    before = resident_bytes()
    zeros = HostMemory().zeros(SIZE, sparse=True).storage()
    zeros[::FAR] = True
    assert resident_bytes() - before < SIZE // 8
    zeros[:] = True
    assert resident_bytes() - before > SIZE // 2


def test_buffers_are_zeros_of_their_size() -> None:
    for buffer in (HostMemory().zeros(5000, sparse=True).storage(), host_buffer(5000)):
        assert buffer.shape == (5000,)
        assert not np.any(buffer)
