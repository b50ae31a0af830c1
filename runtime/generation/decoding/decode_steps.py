"""Decode steps of fixed shapes, whose logits come to the host."""

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT
from trt_lora.plugins.contract.step import LOGITS
from trt_lora.runtime.engines.engine import PreparedRun, PreparesRuns
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import INPUT_IDS, LENGTHS, Ids
from trt_lora.runtime.generation.decoding.step_runs import StepRuns
from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import TensorMap


class DecodeSteps:
    """One token for each of the first rows of a cache; see `StepRuns`."""

    def __init__(self, executor: PreparesRuns, memory: Memory, cache: KVCache) -> None:
        """Prepare nothing yet.

        Args:
            executor: a running engine.
            memory: the executor's.
            cache: its rows.
        """
        self._cache = cache
        self._runs: StepRuns[PreparedRun] = StepRuns(executor.prepare, memory, cache)

    def rows(self, count: int) -> int:
        """Return how many rows a step of `count` runs."""
        return self._runs.rows(count)

    def run(self, tokens: Ids, adapter: TensorMap) -> Logits:
        """Append a token to each of the first rows; the caller lengthens them.

        Args:
            tokens: [n].
            adapter: the LoRA bindings; the same object as long as they stay the same.

        Returns:
            Logits [n, vocab] as float32, until the next step of as many rows.
        """
        count = len(tokens)
        run = self._runs.bound(count, adapter)
        run.inputs[INPUT_IDS][:count, 0] = tokens
        run.inputs[LENGTHS][:] = self._cache.lengths[: self.rows(count)]
        if LORA_SLOT in run.inputs:
            run.inputs[LORA_SLOT][:] = BASE_SLOT
            run.inputs[LORA_SLOT][:count] = adapter[LORA_SLOT].storage()
        run.run()
        return run.outputs[LOGITS].numpy()[:count].astype(np.float32, copy=False)
