"""A static KV cache: rows admitted, moved, cleared and released; the table stays right."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.errors import ConfigError, StateError, TensorError
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.memory.host import HostMemory

ROWS, LENGTH = 4, 32


def cache(rows: int = ROWS) -> KVCache:
    return KVCache(make_manifest(), HostMemory(), rows)


def rows_of(kv: KVCache) -> dict[str, Any]:
    """Every cache input over all rows, in place."""
    return {name: tensor.numpy() for name, tensor in kv.views(0, kv.rows).items()}


def test_every_input_of_the_cache_has_zeros_of_its_own() -> None:
    kv = cache()
    arrays = rows_of(kv)
    assert {name: array.shape for name, array in arrays.items()} == {
        "cache.0.key": (ROWS, 2, LENGTH, 3),
        "cache.0.value": (ROWS, 2, LENGTH, 5),
    }
    for index, array in enumerate(arrays.values()):
        assert not array.any()
        array[:] = index + 1
    assert [float(array.min()) for array in arrays.values()] == [1.0, 2.0]
    assert all(tensor.pointer % 256 == 0 for tensor in kv.views(0, ROWS).values())


def test_a_view_is_the_memory_of_its_rows_and_the_same_object_each_time() -> None:
    kv = cache()
    rows_of(kv)["cache.0.value"][2] = 7
    assert (kv.views(2, 1)["cache.0.value"].numpy() == 7).all()
    assert not kv.views(3, 1)["cache.0.value"].numpy().any()
    assert kv.views(1, 2)["cache.0.key"] is kv.views(1, 2)["cache.0.key"]


def test_a_sequence_has_one_row_and_one_that_has_none_is_named() -> None:
    kv = cache(2)
    assert [kv.admit("a"), kv.admit("b")] == [0, 1]
    with pytest.raises(StateError, match="'a' has a row already"):
        kv.admit("a")
    with pytest.raises(StateError, match="all 2 rows are in use"):
        kv.admit("c")
    with pytest.raises(StateError, match=r"'c' has no row; admitted are: \['a', 'b'\]"):
        kv.release("c")


@pytest.mark.parametrize("rows", [0, 5])
def test_more_rows_than_the_engine_takes_are_refused(rows: int) -> None:
    with pytest.raises(ConfigError, match=rf"{rows} sequences do not fit this engine's batch of 4"):
        cache(rows)


def test_the_end_of_a_row_is_not_passed() -> None:
    kv = cache()
    kv.lengths[1] = LENGTH - 2
    kv.check_room(0, np.array([LENGTH, 2]))
    with pytest.raises(TensorError, match=r"33 tokens are more than this engine's 32"):
        kv.check_room(0, np.array([1, 3]))


def test_a_row_that_held_no_numbers_is_zero_when_it_is_free() -> None:
    kv = cache()
    for owner in "abc":
        kv.admit(owner)
    for array in rows_of(kv).values():
        array[0], array[1], array[2] = 1, np.nan, 3
    kv.lengths[2] = kv.max_len
    kv.release("b", clear=True)
    for array in rows_of(kv).values():
        assert (array[1] == 3).all()
        assert not array[2].any()
    kv.release("c", clear=True)
    assert not any(array[1].any() for array in rows_of(kv).values())


def test_a_table_that_contradicts_itself_is_an_error() -> None:
    kv = cache()
    kv.admit("a")
    kv.check_integrity()
    kv.lengths[3] = 1
    with pytest.raises(StateError, match=r"rows have lengths \[0, 0, 0, 1\] of 32"):
        kv.check_integrity()


class Table(RuleBasedStateMachine):
    """Sequences come and go; each finds in its row what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = cache()
        self.written: dict[int, int] = {}  # length by owner, who writes its own number
        self.next = 1

    @precondition(lambda self: len(self.written) < ROWS)
    @rule(length=st.integers(0, LENGTH))
    def admit(self, length: int) -> None:
        row = self.cache.admit(self.next)
        for array in rows_of(self.cache).values():
            array[row, :, :length] = self.next
        self.cache.lengths[row] = length
        self.written[self.next] = length
        self.next += 1

    @precondition(lambda self: self.written)
    @rule(data=st.data(), clear=st.booleans())
    def release(self, data: st.DataObject, clear: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(self.written)))
        self.cache.release(owner, clear=clear)
        del self.written[owner]

    @invariant()
    def everyone_has_what_he_wrote(self) -> None:
        self.cache.check_integrity()
        assert set(self.cache.owners) == set(self.written)
        for owner, length in self.written.items():
            row = self.cache.row_of(owner)
            assert self.cache.lengths[row] == length
            for array in rows_of(self.cache).values():
                assert (array[row, :, :length] == owner).all()


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=30, deadline=None)
