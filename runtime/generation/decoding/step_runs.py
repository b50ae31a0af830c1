"""Prepared runs of a decode step: one for each span of neighbouring rows."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT, SLOT_DTYPE
from trt_lora.plugins.contract.step import LOGITS, SOURCE_LENGTHS
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.engines.topk import TopKRun
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import (
    BOUND,
    INPUT_IDS,
    KEPT_PLACES,
    LENGTHS,
    token_inputs,
)
from trt_lora.runtime.memory.tensor import HOST, Tensor, TensorMap, tensor_from_numpy

# Positions looked at, on the host, are a multiple of this: telling ONNX Runtime of one more takes
# 0.2 ms in a step, and looking at one more up to 0.05, where attention has a mask.
_POSITIONS = 16
_MOST_RUNS = 16  # that are kept, if a step does not take more


@dataclass(frozen=True)
class Span:
    """Neighbouring rows of a cache that are run together."""

    first: int
    rows: int
    kept: int  # how many of them get logits

    @property
    def end(self) -> int:
        """The row behind them."""
        return self.first + self.rows


@dataclass(eq=False)
class _Prepared:
    """A run, and what it is bound to."""

    span: Span
    adapter: TensorMap
    positions: int  # that it looks at
    run: TopKRun


class StepRuns:
    """Runs of spans of rows, each with an adapter.

    On a GPU there are runs of 1, 2, 4, ... rows, which begin at a multiple of as many, or of what
    is left at the end, and a run looks at all positions of the cache. So its shapes and addresses
    depend on the span alone, spans are few, and only tokens and lengths are written anew. Rows
    beyond those asked for write behind their own end, where their next token goes, and what they
    compute is not read. On the host, where there are no graphs, a run has no such rows, gives
    logits to the rows that are asked for alone, and looks at as many positions as it needs, up to
    the next multiple of 16.

    The groups of a step have a run each. One that a step does not need is bound to another adapter
    when that comes with the same span. Until then a GPU's keeps the adapter before alive; the host
    forgets those of adapters that the last step did not use. Where rows have slots, and those lie
    on the host, a run has an input of its own for them.
    """

    def __init__(self, executor: Executor, cache: KVCache) -> None:
        """Prepare nothing yet.

        Args:
            executor: a running engine.
            cache: its rows.
        """
        self._prepare = partial(executor.prepare_topk, logits=LOGITS, fed=INPUT_IDS)
        self._cache = cache
        self._has_source = SOURCE_LENGTHS in executor.input_names
        self._of_encoder = executor.manifest.lora_bindings.keys() - set(executor.input_names)
        self._is_on_host = executor.memory.device == HOST
        self._zeros = executor.memory.zeros(cache.max_len)
        self._made: list[_Prepared] = []  # those taken last last
        self._taken: list[_Prepared] = []  # by the step at hand

    @property
    def overlap(self) -> bool:
        """Whether a run goes on by itself while the host does something else."""
        return not self._is_on_host

    def span(self, first: int, count: int, kept: int) -> Span:
        """Return what a step runs of so many neighbouring rows.

        Args:
            first: the first row that is asked for.
            count: from there to the last one.
            kept: how many of them are asked for; others are idle.
        """
        if self._is_on_host:
            return Span(first, count, kept)
        rows = 1 << (count - 1).bit_length()
        while first % rows + count > rows:
            rows *= 2
        first -= first % rows
        rows = min(rows, self._cache.rows - first)
        return Span(first, rows, rows)

    def take(self, span: Span, adapter: TensorMap) -> TopKRun:
        """Return the run of a group of the step at hand, which no other group has.

        Args:
            span: its rows.
            adapter: the LoRA bindings; the same object as long as they stay the same.
        """
        positions = self._positions(span)
        free = [step for step in self._made if step.span == span and step not in self._taken]
        step = next((s for s in free if s.adapter is adapter), free[0] if free else None)
        if step is None:
            step = _Prepared(span, adapter, positions, self._new_run(span, adapter, positions))
        else:
            self._made.remove(step)
        self._made.append(step)
        self._taken.append(step)
        if step.adapter is not adapter:
            step.run.bind(self._read(adapter))
            step.adapter = adapter
        if step.positions != positions:
            step.run.bind(TensorMap({BOUND: self._bound(positions)}))
            step.positions = positions
        return step.run

    def end_step(self) -> None:
        """Let other steps take the runs of this one, and forget what it does not need."""
        used = {id(step.adapter) for step in self._taken}
        if self._is_on_host:
            self._made = [
                step
                for step in self._made
                if _has_own_slots(step.adapter) or id(step.adapter) in used
            ]
        del self._made[: -max(_MOST_RUNS, len(self._taken))]
        self._taken = []

    def discard(self) -> None:
        """Wait for what is under way, and forget what it finds."""
        self._taken = []
        for step in self._made:
            step.run.discard()

    def _positions(self, span: Span) -> int:
        """How many positions a step looks at."""
        if not self._is_on_host:
            return self._cache.max_len
        needed = int(self._cache.lengths[span.first : span.end].max()) + 1
        return min(-(-needed // _POSITIONS) * _POSITIONS, self._cache.max_len)

    def _bound(self, positions: int) -> Tensor:
        """The input whose size says how many positions are looked at."""
        return replace(self._zeros, shape=(positions,))

    def _read(self, adapter: TensorMap) -> TensorMap:
        """What runs take of an adapter: no slots of their own, and nothing of an encoder."""
        left_out = self._of_encoder | ({LORA_SLOT} if _has_own_slots(adapter) else set())
        if not left_out:
            return adapter
        return TensorMap({name: t for name, t in adapter.items() if name not in left_out})

    def _new_run(self, span: Span, adapter: TensorMap, positions: int) -> TopKRun:
        ids, lengths = np.zeros((span.rows, 1), np.int64), np.zeros(span.rows, np.int64)
        tokens = token_inputs(ids, lengths, np.arange(span.kept), 0)
        tensor_map = TensorMap(adapter)
        if _has_own_slots(adapter):
            tensor_map[LORA_SLOT] = tensor_from_numpy(np.full(span.rows, BASE_SLOT, SLOT_DTYPE))
        tensor_map.update(
            {n: tensor_from_numpy(tokens[n]) for n in (INPUT_IDS, LENGTHS, KEPT_PLACES)}
        )
        if self._has_source:
            sources = self._cache.source_lengths[span.first : span.end].copy()
            tensor_map[SOURCE_LENGTHS] = tensor_from_numpy(sources)
        tensor_map.update(self._cache.views(span.first, span.rows))
        tensor_map[BOUND] = self._bound(positions)
        return self._prepare(tensor_map)


def _has_own_slots(adapter: TensorMap) -> bool:
    """Whether every row has a slot, which a step brings; otherwise one is bound for all rows."""
    return LORA_SLOT in adapter and adapter[LORA_SLOT].device == HOST
