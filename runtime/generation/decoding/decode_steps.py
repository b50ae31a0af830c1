"""Decode steps of fixed shapes: one prepared run for each number of rows, in powers of two."""

import numpy as np

from trt_lora.runtime.engines.engine import PreparedRun, PreparesRuns
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.static_inputs import (
    BOUND,
    KEPT_PLACES,
    LENGTHS,
    static_token_inputs,
)
from trt_lora.runtime.generation.decoding.step_inputs import INPUT_IDS, LOGITS, Ids
from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import TensorMap, tensor_from_numpy


class DecodeSteps:
    """One token for each of the first rows of a cache.

    A run is of 1, 2, 4, ... rows, or of all: rows beyond those asked for write behind their own
    end, where their next token goes, and what they compute is not read. It looks at all positions
    of the cache. So its shapes and addresses depend on the number of rows alone, and only tokens
    and lengths are written anew.

    An adapter is bound to a run when that run is next made: it keeps the one before alive until
    then.
    """

    def __init__(self, executor: PreparesRuns, memory: Memory, cache: KVCache) -> None:
        """Prepare nothing yet.

        Args:
            executor: a running engine.
            memory: the executor's.
            cache: its rows.
        """
        self._executor, self._cache = executor, cache
        self._bound = memory.zeros(cache.max_len)
        self._runs: dict[int, PreparedRun] = {}  # by the number of rows
        self._adapters: dict[int, TensorMap] = {}  # that they are bound to

    def rows(self, count: int) -> int:
        """Return how many rows a step of `count` runs."""
        return min(1 << (count - 1).bit_length(), self._cache.rows)

    def run(self, tokens: Ids, adapter: TensorMap) -> Logits:
        """Append a token to each of the first rows; the caller lengthens them.

        Args:
            tokens: [n].
            adapter: the LoRA bindings; the same object as long as they stay the same.

        Returns:
            Logits [n, vocab] as float32, until the next step of as many rows.
        """
        count = len(tokens)
        run = self._bound_run(self.rows(count), adapter)
        run.inputs[INPUT_IDS][:count, 0] = tokens
        run.inputs[LENGTHS][:] = self._cache.lengths[: self.rows(count)]
        run.run()
        return run.outputs[LOGITS].numpy()[:count].astype(np.float32, copy=False)

    def _bound_run(self, rows: int, adapter: TensorMap) -> PreparedRun:
        if rows not in self._runs:
            self._runs[rows] = self._prepared(rows, adapter)
        elif self._adapters[rows] is not adapter:
            self._runs[rows].bind(adapter)
        self._adapters[rows] = adapter
        return self._runs[rows]

    def _prepared(self, rows: int, adapter: TensorMap) -> PreparedRun:
        ids, places = np.zeros((rows, 1), np.int64), np.arange(rows)
        tokens = static_token_inputs(ids, self._cache.lengths[:rows], places, 0)
        tensor_map = TensorMap(adapter)
        tensor_map.update(
            {n: tensor_from_numpy(tokens[n]) for n in (INPUT_IDS, LENGTHS, KEPT_PLACES)}
        )
        tensor_map.update(self._cache.views(0, rows))
        tensor_map[BOUND] = self._bound  # a bool for each position
        return self._executor.prepare(tensor_map)
