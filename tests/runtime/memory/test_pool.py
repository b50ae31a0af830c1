"""`runtime/memory/pool.py` on a fake CUDA runtime."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations

import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import Status

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.memory.pool import DevicePool, size_class

KIB = 1 << 10


@contextmanager
def pool_of(cuda: FakeCuda, max_free_bytes: int = KIB << 10) -> Iterator[DevicePool]:
    """A pool from which all is given back at the end, and which has kept no more than it may."""
    pool = DevicePool(0, max_free_bytes)
    yield pool
    gc.collect()
    assert pool.free_bytes == sum(block.memory.size for block in cuda.live_blocks())
    assert pool.free_bytes <= max_free_bytes


def test_the_lowest_free_address_of_a_size_is_taken_first(cuda: FakeCuda) -> None:
    with pool_of(cuda) as pool:
        first, second, third = (pool.take(1000) for _ in range(3))
        addresses = [first.pointer, second.pointer, third.pointer]
        assert addresses == sorted(addresses)
        del second, third, first

        again = [pool.take(1000) for _ in range(3)]
        assert [buffer.pointer for buffer in again] == addresses
        del again


@pytest.mark.parametrize("steps", [3, 4])
def test_generations_alternate_between_the_same_two_buffers(cuda: FakeCuda, steps: int) -> None:
    with pool_of(cuda) as pool:
        generations = []
        for _ in range(3):
            cache = None
            pointers = []
            for _ in range(steps):
                cache = pool.take(1000)  # the cache before lives until there is a new one
                pointers.append(cache.pointer)
            del cache
            generations.append(pointers)

    assert generations[0] == generations[1] == generations[2]
    assert len(set(generations[0])) == 2


def test_a_buffer_is_not_handed_out_for_another_size(cuda: FakeCuda) -> None:
    with pool_of(cuda) as pool:
        small = pool.take(300).pointer
        large = pool.take(300 * KIB).pointer

    assert small != large


def test_no_more_than_the_limit_is_kept_and_the_size_used_longest_ago_goes(cuda: FakeCuda) -> None:
    with pool_of(cuda, 5 * KIB) as pool:
        old, used = pool.take(2 * KIB), pool.take(KIB)
        del old, used
        pool.take(2 * KIB)  # used again, and free again
        pool.take(3 * KIB)
        assert pool.free_bytes == 5 * KIB
        before = cuda.names().count("cudaMallocAsync")

        pool.take(2 * KIB)
        assert cuda.names().count("cudaMallocAsync") == before


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_address_that_is_taken_first_is_not_the_one_that_goes(
    cuda: FakeCuda, order: tuple[int, ...]
) -> None:
    """Graphs know the addresses that are taken first."""
    with pool_of(cuda, 2 * KIB) as pool:
        buffers = {index: pool.take(KIB) for index in range(3)}
        lowest = buffers[0].pointer
        for index in order:
            del buffers[index]

        assert pool.free_bytes == 2 * KIB
        assert pool.take(KIB).pointer == lowest


def test_a_buffer_larger_than_the_limit_is_freed_at_once(cuda: FakeCuda) -> None:
    with pool_of(cuda, KIB) as pool:
        pool.take(2 * KIB)

        assert not cuda.live_blocks()


def test_what_is_kept_makes_room_when_the_device_is_full(cuda: FakeCuda) -> None:
    with pool_of(cuda) as pool:
        pool.take(1000)
        for allocate in (pool.take, pool.allocate):
            cuda.fail("cudaMallocAsync", Status.cudaErrorMemoryAllocation)
            buffer = allocate(5000)
            assert pool.free_bytes == 0
            del buffer
            pool.take(1000)


def test_a_device_that_is_full_without_anything_kept_is_an_error(cuda: FakeCuda) -> None:
    with pool_of(cuda) as pool:
        cuda.fail("cudaMallocAsync", Status.cudaErrorMemoryAllocation)
        with pytest.raises(BackendError, match="out of memory"):
            pool.take(1000)


def test_a_buffer_released_while_the_pool_is_busy_is_sorted_in_afterwards(cuda: FakeCuda) -> None:
    with pool_of(cuda) as pool:
        buffers = [pool.take(1000), pool.take(1000)]
        with pool._sorted():  # as when garbage is collected in the middle of `take`
            buffers.pop()
            assert pool.free_bytes == 0
        assert pool.free_bytes == size_class(1000)
        del buffers


def test_a_pool_that_is_forgotten_frees_what_it_kept(cuda: FakeCuda) -> None:
    pool = DevicePool(0, KIB << 10)
    kept, used = pool.take(1000), pool.take(1000)
    del kept
    assert len(cuda.live_blocks()) == 2
    del pool
    assert len(cuda.live_blocks()) == 2  # a buffer in use holds its pool

    del used
    assert not cuda.live_blocks()


def test_memory_that_nobody_could_wait_for_is_freed(cuda: FakeCuda) -> None:
    cuda.fail("cudaStreamSynchronize", Status.cudaErrorInvalidValue)
    with pool_of(cuda) as pool, pytest.raises(BackendError, match="cudaStreamSynchronize"):
        pool.take(1000)

    assert not cuda.live_blocks()


def test_a_size_class_holds_its_size_and_at_most_a_quarter_more() -> None:
    for nbytes in [*range(5000), 10**6 + 1, 2**20, 2**20 + 1, 10**10 + 7]:
        size = size_class(nbytes)
        assert size >= max(nbytes, 256)
        assert size % 256 == 0
        assert size == size_class(size)
        assert size <= max(nbytes + 256, nbytes * 5 // 4 + 1)
