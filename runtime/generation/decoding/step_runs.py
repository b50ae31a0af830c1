"""Prepared runs of a decode step: one for each number of rows."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT, SLOT_DTYPE
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import (
    BOUND,
    INPUT_IDS,
    KEPT_PLACES,
    LENGTHS,
    token_inputs,
)
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap, tensor_from_numpy

# Positions looked at, on the host, are a multiple of this: telling ONNX Runtime of one more takes
# 0.2 ms in a step, and looking at one more up to 0.05, where attention has a mask.
_POSITIONS = 16


class Bindable(Protocol):
    """A run that takes other tensors; see `PreparedRun.bind`."""

    def bind(self, tensor_map: TensorMap) -> None:
        """Take them from the next run on."""
        ...


Run = TypeVar("Run", bound=Bindable)


@dataclass
class _Made(Generic[Run]):
    """A run, and what it is bound to."""

    run: Run
    adapter: TensorMap
    positions: int  # that it looks at


class StepRuns(Generic[Run]):
    """Runs of the first rows of a cache.

    On a GPU there are runs of 1, 2, 4, ... rows, or of all, and a run looks at all positions of
    the cache. So its shapes and addresses depend on the number of rows alone, and only tokens and
    lengths are written anew. Rows beyond those asked for write behind their own end, where their
    next token goes, and what they compute is not read. On the host, where there are no graphs,
    a run has no such rows, and looks at as many positions as it needs, up to the next multiple
    of 16.

    An adapter is bound to a run when that run is next made. Until then a GPU's keeps the one
    before alive; those on the host, which are prepared soon, are forgotten. Where rows have slots,
    and those lie on the host, a run has an input of its own for them.
    """

    def __init__(self, prepare: Callable[[TensorMap], Run], memory: Memory, cache: KVCache) -> None:
        """Prepare nothing yet.

        Args:
            prepare: makes a run of all inputs of a step.
            memory: the executor's.
            cache: its rows.
        """
        self._prepare, self._cache = prepare, cache
        self._is_on_host = memory.device == HOST
        self._zeros = memory.zeros(cache.max_len)
        self._made: dict[int, _Made[Run]] = {}  # by the number of rows

    def rows(self, count: int) -> int:
        """Return how many rows a step of `count` runs."""
        if self._is_on_host:
            return count
        return min(1 << (count - 1).bit_length(), self._cache.rows)

    def bound(self, count: int, adapter: TensorMap) -> Run:
        """Return the run of a step of `count` rows.

        Args:
            count: the rows asked for.
            adapter: the LoRA bindings; the same object as long as they stay the same.
        """
        rows, positions = self.rows(count), self._positions(count)
        if rows not in self._made:
            run = self._prepared(rows, adapter, positions)
            self._made[rows] = _Made(run, adapter, positions)
        made = self._made[rows]
        if made.adapter is not adapter:
            made.run.bind(_without_own_slots(adapter))
            made.adapter = adapter
        if made.positions != positions:
            made.run.bind(TensorMap({BOUND: self._bound(positions)}))
            made.positions = positions
        if self._is_on_host:
            self._forget_other_adapters(adapter)
        return made.run

    def _forget_other_adapters(self, adapter: TensorMap) -> None:
        """Where rows have slots, nothing is: their stacks are the same for all."""
        if not _has_own_slots(adapter):
            others = [rows for rows, made in self._made.items() if made.adapter is not adapter]
            for rows in others:
                del self._made[rows]

    def _positions(self, count: int) -> int:
        """How many positions a step of `count` rows looks at."""
        if not self._is_on_host:
            return self._cache.max_len
        needed = int(self._cache.lengths[:count].max()) + 1
        return min(-(-needed // _POSITIONS) * _POSITIONS, self._cache.max_len)

    def _bound(self, positions: int) -> Tensor:
        """The input whose size says how many positions are looked at."""
        return replace(self._zeros, shape=(positions,))

    def _prepared(self, rows: int, adapter: TensorMap, positions: int) -> Run:
        ids, lengths = np.zeros((rows, 1), np.int64), np.zeros(rows, np.int64)
        tokens = token_inputs(ids, lengths, np.arange(rows), 0)
        tensor_map = TensorMap(adapter)
        if _has_own_slots(adapter):
            tensor_map[LORA_SLOT] = tensor_from_numpy(np.full(rows, BASE_SLOT, SLOT_DTYPE))
        tensor_map.update(
            {n: tensor_from_numpy(tokens[n]) for n in (INPUT_IDS, LENGTHS, KEPT_PLACES)}
        )
        tensor_map.update(self._cache.views(0, rows))
        tensor_map[BOUND] = self._bound(positions)
        return self._prepare(tensor_map)


def _without_own_slots(adapter: TensorMap) -> TensorMap:
    if not _has_own_slots(adapter):
        return adapter
    return TensorMap({name: tensor for name, tensor in adapter.items() if name != LORA_SLOT})


def _has_own_slots(adapter: TensorMap) -> bool:
    """Whether every row has a slot, which a step brings; otherwise one is bound for all rows."""
    return LORA_SLOT in adapter and adapter[LORA_SLOT].device == HOST
