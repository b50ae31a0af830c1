"""Prepared runs of a decode step: one for each number of rows, in powers of two."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT, SLOT_DTYPE
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.static_inputs import (
    BOUND,
    KEPT_PLACES,
    LENGTHS,
    static_token_inputs,
)
from trt_lora.runtime.generation.decoding.step_inputs import INPUT_IDS
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import HOST, TensorMap, tensor_from_numpy


class Bindable(Protocol):
    """A run that takes other tensors; see `PreparedRun.bind`."""

    def bind(self, tensor_map: TensorMap) -> None:
        """Take them from the next run on."""
        ...


Run = TypeVar("Run", bound=Bindable)


class StepRuns(Generic[Run]):
    """Runs of 1, 2, 4, ... of the first rows of a cache, or of all.

    Rows beyond those asked for write behind their own end, where their next token goes, and what
    they compute is not read. A run looks at all positions of the cache. So its shapes and
    addresses depend on the number of rows alone, and only tokens and lengths are written anew.

    An adapter is bound to a run when that run is next made: it keeps the one before alive until
    then. Where rows have slots, and those lie on the host, a run has an input of its own for them.
    """

    def __init__(self, prepare: Callable[[TensorMap], Run], memory: Memory, cache: KVCache) -> None:
        """Prepare nothing yet.

        Args:
            prepare: makes a run of all inputs of a step.
            memory: the executor's.
            cache: its rows.
        """
        self._prepare, self._cache = prepare, cache
        self._bound = memory.zeros(cache.max_len)
        self._runs: dict[int, Run] = {}  # by the number of rows
        self._adapters: dict[int, TensorMap] = {}  # that they are bound to

    def rows(self, count: int) -> int:
        """Return how many rows a step of `count` runs."""
        return min(1 << (count - 1).bit_length(), self._cache.rows)

    def bound(self, count: int, adapter: TensorMap) -> Run:
        """Return the run of a step of `count` rows.

        Args:
            count: the rows asked for.
            adapter: the LoRA bindings; the same object as long as they stay the same.
        """
        rows = self.rows(count)
        if rows not in self._runs:
            self._runs[rows] = self._prepared(rows, adapter)
        elif self._adapters[rows] is not adapter:
            bound = TensorMap(adapter)
            if _has_own_slots(adapter):
                del bound[LORA_SLOT]
            self._runs[rows].bind(bound)
        self._adapters[rows] = adapter
        return self._runs[rows]

    def _prepared(self, rows: int, adapter: TensorMap) -> Run:
        ids, places = np.zeros((rows, 1), np.int64), np.arange(rows)
        tokens = static_token_inputs(ids, self._cache.lengths[:rows], places, 0)
        tensor_map = TensorMap(adapter)
        if _has_own_slots(adapter):
            tensor_map[LORA_SLOT] = tensor_from_numpy(np.full(rows, BASE_SLOT, SLOT_DTYPE))
        tensor_map.update(
            {n: tensor_from_numpy(tokens[n]) for n in (INPUT_IDS, LENGTHS, KEPT_PLACES)}
        )
        tensor_map.update(self._cache.views(0, rows))
        tensor_map[BOUND] = self._bound  # a bool for each position
        return self._prepare(tensor_map)


def _has_own_slots(adapter: TensorMap) -> bool:
    """Whether every row has a slot, which a step brings; otherwise one is bound for all rows."""
    return LORA_SLOT in adapter and adapter[LORA_SLOT].device == HOST
