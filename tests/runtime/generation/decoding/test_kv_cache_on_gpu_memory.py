"""`KVCache` on the memory of a fake GPU: rows that move, are copied and cleared."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.fakes.fake_cuda import FakeCuda
from support.fakes.fake_cuda_state import MAX_PITCH
from support.fakes.tiny_engine import KEY, VALUE, small_manifest

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.manifest import Binding, Manifest
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.host import Blocks, HostMemory, Memory
from trt_lora.runtime.memory.tensor import tensor_from_numpy

ROWS = 4


def manifest_of(*heads: int) -> Manifest:
    """Layers [batch, heads, 16, 8] in turns of so many heads, three times."""
    caches = tuple(
        Binding(f"cache.{layer}.{index}", "float16", ("batch", count, 16, 8))
        for layer in range(3)
        for index, count in enumerate(heads)
    )
    return replace(small_manifest(max_len=16), inputs=caches)


def filled(memory: Memory, manifest: Manifest) -> KVCache:
    """Return a cache of four rows whose values tell row and layer."""
    cache = KVCache(manifest, memory, ROWS)
    for row in range(ROWS):
        cache.admit(row)
        cache.lengths[row] = row + 1
        for number, view in enumerate(cache.views(row, 1).values()):
            values = np.full(view.shape, 10 * row + number, np.float16)
            (source,) = memory.upload({"values": tensor_from_numpy(values)}).values()
            memory.copy(view.pointer, source.pointer, Blocks(view.nbytes))
    return cache


def row_values(cache: KVCache, row: int, count: int = 16) -> list[set[float]]:
    """Return the different values of each layer of a row, in its first tokens."""
    views = cache.views(row, 1).values()
    return [set(view.numpy()[:, :, :count].ravel().tolist()) for view in views]


def written(row: int, layers: int) -> list[set[float]]:
    """Return what `filled` wrote."""
    return [{10.0 * row + number} for number in range(layers)]


@pytest.mark.parametrize("make_memory", [HostMemory, CudaMemory])
@pytest.mark.parametrize("heads", [(2, 2), (2, 1), (1, 2, 2)])
def test_the_last_row_moves_to_the_one_that_is_released_and_no_other_changes(
    cuda: FakeCuda, make_memory: Callable[[], Memory], heads: tuple[int, ...]
) -> None:
    cache = filled(make_memory(), manifest_of(*heads))
    layers = 3 * len(heads)
    cache.release(1)

    assert cache.owners == (0, 3, 2)
    assert cache.lengths.tolist() == [1, 4, 3, 0]
    cache.check_integrity()
    for row, value in enumerate((0, 3, 2)):
        assert row_values(cache, row, value + 1) == written(value, layers)
    assert row_values(cache, 3) == written(3, layers)


@pytest.mark.parametrize("make_memory", [HostMemory, CudaMemory])
@pytest.mark.parametrize("heads", [(2, 2), (2, 1), (1, 2, 2)])
def test_a_row_that_is_released_and_cleared_leaves_zeros_and_no_other_changes(
    cuda: FakeCuda, make_memory: Callable[[], Memory], heads: tuple[int, ...]
) -> None:
    cache = filled(make_memory(), manifest_of(*heads))
    layers = 3 * len(heads)
    cache.release(3, clear=True)
    cache.release(0, clear=True)

    assert cache.owners == (2, 1)
    assert row_values(cache, 0, 3) == written(2, layers)
    assert row_values(cache, 1) == written(1, layers)
    assert [row_values(cache, row) for row in (2, 3)] == [[{0.0}] * layers] * 2


@pytest.mark.parametrize(("heads", "copies"), [((2,), 2), ((2, 2), 2), ((2, 1), 3)])
def test_a_head_of_a_row_is_one_copy_on_the_device_for_each_shape_of_a_cache(
    cuda: FakeCuda, heads: tuple[int, ...], copies: int
) -> None:
    cache = filled(CudaMemory(), manifest_of(*heads))
    before = len(cuda.calls)
    cache.copy_row(0, 2)
    names = cuda.names()[before:]
    layers = 3 * len(heads)

    assert [name for name in names if "Memcpy" in name] == ["cudaMemcpy2DAsync"] * copies
    assert row_values(cache, 2, 1) == row_values(cache, 0) == written(0, layers)
    assert cache.lengths[2] == 1
    del cache


def test_layers_that_are_not_equally_far_apart_are_copied_one_by_one(cuda: FakeCuda) -> None:
    uneven = manifest_of(2, 1)
    caches = (*uneven.inputs, *replace(manifest_of(1), inputs=manifest_of(2).inputs[:1]).inputs)
    named = tuple(replace(b, name=f"cache.{i}.key") for i, b in enumerate(caches))
    cache = filled(CudaMemory(), replace(uneven, inputs=named))
    cache.copy_row(1, 3)

    assert row_values(cache, 3, 2) == written(1, 7)


@pytest.mark.parametrize("make_memory", [HostMemory, CudaMemory])
def test_a_row_moves_with_what_a_step_ahead_has_written_and_not_with_what_is_behind(
    cuda: FakeCuda, make_memory: Callable[[], Memory]
) -> None:
    cache = filled(make_memory(), manifest_of(2, 1))
    cache.lengths[0] = 15
    for source, target, moved in ((1, 2, 3), (0, 3, 16)):
        cache.copy_row(source, target)
        for view in cache.views(target, 1).values():
            same = (view.numpy() // 10 == source).all(axis=(0, 1, 3))
            assert same.tolist() == [True] * moved + [False] * (16 - moved)


def test_blocks_further_apart_than_cuda_takes_are_copied_one_by_one(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    block = memory.zeros(512)
    before = len(cuda.calls)
    for stride, copied in ((256, "cudaMemcpy2DAsync"), (MAX_PITCH + 1, "cudaMemcpyAsync")):
        memory.copy(block.pointer, block.pointer + 256, Blocks(16, count=1, stride=stride))
        assert [name for name in cuda.names()[before:] if "Memcpy" in name] == [copied]
        before = len(cuda.calls)
    for stride, filled_by in ((256, "cudaMemset2DAsync"), (MAX_PITCH + 1, "cudaMemsetAsync")):
        memory.clear(block.pointer, Blocks(16, count=1, stride=stride))
        assert [name for name in cuda.names()[before:] if "Memset" in name] == [filled_by]
        before = len(cuda.calls)


def test_what_the_device_does_to_rows_is_done_when_the_call_returns(cuda: FakeCuda) -> None:
    cache = filled(CudaMemory(), small_manifest())
    assert {KEY, VALUE} == set(cache.views(0, 1))
    cache.copy_row(0, 1)
    assert cuda.names()[-1] == "cudaStreamSynchronize"
    cache.release(ROWS - 1, clear=True)
    assert cuda.names()[-1] == "cudaStreamSynchronize"


def test_the_memory_goes_with_the_cache_and_waits_for_no_garbage_collector(cuda: FakeCuda) -> None:
    memory = CudaMemory()
    cache = KVCache(small_manifest(), memory, 2)
    cache.views(0, 1)
    assert cuda.live_device_bytes() == cache.nbytes
    del cache
    assert cuda.live_device_bytes() == 0


def test_rows_that_tensorrt_cannot_be_given_the_address_of_are_refused_with_a_length_that_does(
    cuda: FakeCuda,
) -> None:
    manifest = small_manifest(max_len=24)  # places of 16 bytes
    assert KVCache(manifest, HostMemory(), 2).rows == 2
    with pytest.raises(ConfigError, match=r"a row of cache.0.key has 384 bytes.* multiple of 16$"):
        KVCache(manifest, CudaMemory(), 2)
    assert KVCache(manifest, CudaMemory(), 1).rows == 1
