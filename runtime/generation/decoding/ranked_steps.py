"""Decode steps whose logits stay on the device; the next one is begun before one is looked at."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT
from trt_lora.plugins.contract.step import LOGITS
from trt_lora.plugins.errors import BackendError, StateError
from trt_lora.runtime.engines.ranked_run import (
    TEMPERATURES,
    RankedRows,
    RankedRun,
    RanksLogits,
)
from trt_lora.runtime.generation.candidates import Candidates
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import INPUT_IDS, LENGTHS
from trt_lora.runtime.generation.decoding.step_runs import StepRuns
from trt_lora.runtime.generation.next_tokens import RowCandidates
from trt_lora.runtime.memory.host import Memory
from trt_lora.runtime.memory.tensor import TensorMap

NO_SLOTS: Mapping[Any, int] = {}


@dataclass
class _Step:
    """A run under way, or its results."""

    run: RankedRun
    places: Mapping[Any, int]  # of its sequences, as they were when it began
    tokens: Mapping[Any, int] = field(default_factory=dict)  # that each was given
    found: RankedRows | None = None  # once it was waited for
    is_settled: bool = False  # rows may have moved since

    def result(self) -> RankedRows:
        if self.found is None:
            self.found = self.run.result()
        return self.found

    def settle(self) -> None:
        self.is_settled = True
        with contextlib.suppress(BackendError, StateError):  # raised again for who asks
            self.result()


class RankedSteps:
    """One token for each of some sequences in the first rows of a cache; see `StepRuns`.

    A step ahead takes the greedy tokens of the step before where they are, on the device. Rows
    become longer only when its results are taken: until then, what it wrote lies behind their end.
    Its results are taken where the tokens asked for are those that it was given, also where other
    sequences have left since. Otherwise the step is made anew, over what the other wrote.

    Rows are moved and cleared on another stream: call `settle` before.
    """

    def __init__(self, executor: RanksLogits, memory: Memory, cache: KVCache) -> None:
        """Prepare nothing yet.

        Args:
            executor: a running engine.
            memory: the executor's.
            cache: its rows, owned by the sequences.
        """
        prepare = partial(executor.prepare_ranked, logits=LOGITS, fed=INPUT_IDS)
        self._cache = cache
        self._runs: StepRuns[RankedRun] = StepRuns(prepare, memory, cache)
        self._ahead: _Step | None = None
        self._last: RankedRun | None = None  # of which something may be under way

    def run(
        self,
        tokens: Mapping[Any, int],
        temperatures: Mapping[Any, float],
        adapter: TensorMap,
        *,
        ahead: bool,
        slots: Mapping[Any, int] = NO_SLOTS,
    ) -> RowCandidates:
        """Append a token to each sequence named, and lengthen its row.

        Args:
            tokens: by sequence.
            temperatures: by sequence, 0 where greedy.
            adapter: the LoRA bindings; the same object as long as they stay the same.
            ahead: begin the next step of these sequences, which are all, with their greedy tokens.
            slots: by sequence, where each has an adapter of its own.

        Returns:
            Candidates in the order of the rows, until the next step.

        Raises:
            TensorError: a row would be longer than the engine allows.
            BackendError: the step failed; no row is longer.
        """
        try:
            step = self._taken(tokens) or self._begun(tokens, temperatures, adapter, slots)
            begun = self._begun_ahead(step, slots) if ahead and not step.is_settled else None
            found = step.result()
        except BaseException:
            self.drop()
            raise
        if begun is not None:
            begun.tokens = {row: int(found.tokens[at, 0]) for row, at in step.places.items()}
        self._ahead = begun
        for row in tokens:
            self._cache.lengths[self._cache.row_of(row)] += 1
        return row_candidates(found, {row: step.places[row] for row in tokens})

    def settle(self) -> None:
        """Wait for the step ahead; what it found, or failed of, is kept for who asks for it."""
        if self._ahead is not None:
            self._ahead.settle()

    def drop(self) -> None:
        """Wait for what is under way and forget it: the next step is made anew."""
        self._ahead = None
        if self._last is not None:
            self._last.discard()

    def _taken(self, tokens: Mapping[Any, int]) -> _Step | None:
        """The step ahead, if it is the one that is asked for."""
        step = self._ahead
        if step is None:
            return None
        if not step.tokens.items() >= tokens.items():
            self.drop()
            return None
        if len(step.tokens) > len(tokens):
            step.settle()  # the next one is of fewer rows
        return step

    def _begun(
        self,
        tokens: Mapping[Any, int],
        temperatures: Mapping[Any, float],
        adapter: TensorMap,
        slots: Mapping[Any, int],
    ) -> _Step:
        places = {row: self._cache.row_of(row) for row in tokens}
        count = max(places.values()) + 1
        rows = self._runs.rows(count)
        self._cache.check_room(0, np.ones(rows, np.int64))
        self._last = run = self._runs.bound(count, adapter)
        for row, place in places.items():
            run.inputs[INPUT_IDS][place, 0] = tokens[row]
            run.inputs[TEMPERATURES][place] = temperatures[row]
        run.inputs[LENGTHS][:] = self._cache.lengths[:rows]
        _write_slots(run, places, slots)
        run.enqueue()
        return _Step(run, places)

    def _begun_ahead(self, step: _Step, slots: Mapping[Any, int]) -> _Step | None:
        """The next step of the same rows, if all that it runs have room for another token."""
        lengths = step.run.inputs[LENGTHS]
        lengths[:] = self._cache.lengths[: len(lengths)]
        lengths[[*step.places.values()]] += 1  # once the step under way has been taken
        if int(lengths.max()) >= self._cache.max_len:
            return None
        step.run.inputs[TEMPERATURES][:] = 0
        _write_slots(step.run, step.places, slots)
        step.run.enqueue(is_fed=True)
        return _Step(step.run, step.places)


def _write_slots(run: RankedRun, places: Mapping[Any, int], slots: Mapping[Any, int]) -> None:
    """Say which adapter each row takes, where the run asks; an idle row takes the base model."""
    if LORA_SLOT in run.inputs:
        run.inputs[LORA_SLOT][:] = BASE_SLOT
        for row, place in places.items():
            run.inputs[LORA_SLOT][place] = slots[row]


def row_candidates(found: RankedRows, places: Mapping[Any, int]) -> RowCandidates:
    """Return what is found for sequences, by their places among the rows of a run."""
    ordered = sorted(places, key=places.__getitem__)
    at = [places[row] for row in ordered]
    which = slice(len(at)) if at == list(range(len(at))) else at
    tokens, logits, totals, not_finite, rows = found
    (vocabulary,) = rows[0].shape
    return RowCandidates(
        tuple(ordered),
        Candidates(tokens[which], logits[which], totals[which], vocabulary),
        not_finite[which] == 0,
        tuple(rows[place] for place in at),
    )
