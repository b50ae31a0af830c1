"""What the check of a call sees of a kernel that is wrong."""

from collections.abc import Callable

import numpy as np
import pytest
from kernels.call_buffers import CallBuffers
from kernels.calls import checked_sizes, make_call
from kernels.guarded_buffer import HostMemory

from trt_lora.plugins.kernels.group_call import GroupBuffers

CALL = make_call(2, 64, [(40, 8)], "float16")


def right(buffers: GroupBuffers) -> None:
    """A kernel: numpy's answer, rounded once."""
    (exact,) = CALL.expected()
    HostMemory().write(buffers.out[0], exact.astype(np.float16))


def flip_a_bit(address: int) -> None:
    memory = HostMemory()
    memory.write(address, memory.read(address, 1) ^ np.uint8(0x10))


def worst(launch: Callable[[GroupBuffers], None]) -> float:
    with CallBuffers(CALL, HostMemory()) as buffers:
        return CALL.worst(buffers.run(launch))


def test_a_right_kernel_is_right() -> None:
    assert worst(right) <= 1


def test_a_wrong_value_is_seen() -> None:
    def wrong(buffers: GroupBuffers) -> None:
        right(buffers)
        flip_a_bit(buffers.out[0] + 1)

    assert worst(wrong) > 1


def test_what_is_not_written_is_seen() -> None:
    assert worst(lambda buffers: None) == float("inf")


@pytest.mark.parametrize(
    "place",
    [
        lambda buffers: buffers.out[0] - 4,
        lambda buffers: buffers.out[0] + 2 * 40 * 2,
        lambda buffers: buffers.b[0],
    ],
    ids=["before an output", "behind an output", "an input"],
)
def test_a_write_elsewhere_is_seen(place: Callable[[GroupBuffers], int]) -> None:
    def careless(buffers: GroupBuffers) -> None:
        right(buffers)
        flip_a_bit(place(buffers))

    with pytest.raises(AssertionError, match="memory that is no output was written"):
        worst(careless)


def test_the_calls_for_a_gpu_are_281_and_each_has_its_name() -> None:
    assert len({sizes.name for sizes in checked_sizes()}) == 281
