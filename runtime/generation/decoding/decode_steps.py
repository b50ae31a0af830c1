"""Decode steps: a token for each of some rows, and steps that are begun before one is looked at."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from trt_lora.plugins.contract.slots import BASE_SLOT, LORA_SLOT
from trt_lora.plugins.contract.step import SOURCE_LENGTHS
from trt_lora.plugins.errors import BackendError, StateError, TensorError
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.engines.topk import TEMPERATURES, TopK, TopKRun
from trt_lora.runtime.generation.chosen_tokens import StepOutput
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.decoding.step_inputs import INPUT_IDS, KEPT_PLACES, LENGTHS
from trt_lora.runtime.generation.decoding.step_runs import Span, StepRuns
from trt_lora.runtime.memory.tensor import TensorMap


class RowInput(NamedTuple):
    """What a decode step is told of a row."""

    row: int  # of the cache
    token: int
    temperature: float = 0.0  # 0 is greedy
    slot: int = BASE_SLOT  # where rows have adapters of their own


class Group(NamedTuple):
    """Sequences that are run together: in neighbouring rows, between which others may be idle."""

    rows: Mapping[Any, RowInput]  # by sequence
    adapter: TensorMap  # the LoRA bindings; the same object as long as they stay the same


@dataclass
class _Step:
    """A run under way, or its results."""

    run: TopKRun
    span: Span
    adapter: TensorMap
    places: Mapping[Any, int]  # of its sequences among its results, as they were when it began
    tokens: Mapping[Any, int] = field(default_factory=dict)  # that each was given
    found: TopK | None = None  # once it was waited for
    is_settled: bool = False  # rows may have moved since

    def result(self) -> TopK:
        if self.found is None:
            self.found = self.run.result()
        return self.found

    def settle(self) -> None:
        self.is_settled = True
        with suppress(BackendError, StateError):  # raised again for who asks
            self.result()


class DecodeSteps:
    """One token for each of some sequences in rows of a cache; see `StepRuns`.

    A run overlaps with the host's part of the step before where the device works by itself. If all
    are greedy, it is launched before the results of that step are looked at, and takes their
    greedy tokens where they are, on the device. Otherwise `launch_next` launches it as soon as the
    host has chosen the tokens. Rows become longer only when its results are asked for: until
    then, what it wrote lies behind their end. They are taken where the tokens asked for are those
    that it was given, also where other sequences have left since. Otherwise the step is made anew,
    over what the other wrote.

    Rows are moved and cleared on another stream: call `settle` before.
    """

    def __init__(self, executor: Executor, cache: KVCache) -> None:
        """Prepare nothing yet.

        Args:
            executor: a running engine.
            cache: its rows.
        """
        self._cache = cache
        self._runs = StepRuns(executor, cache)
        self._next: _Step | None = None  # that overlaps

    def run(self, groups: Sequence[Group], *, ahead: bool = False) -> list[StepOutput]:
        """Append a token to each sequence named, and lengthen its row.

        Args:
            groups: each with an adapter; their rows may lie between each other's.
            ahead: launch the next step of these sequences with their greedy tokens, if they are one
                group and runs overlap.

        Returns:
            What is found for each group, in the order of its rows, until the next step.

        Raises:
            TensorError: a row would be longer than the engine allows.
            BackendError: the step failed; no row is longer.
        """
        before = self._cache.lengths.copy()
        try:
            steps = self._begin(groups)
            following = None
            if ahead and self._runs.overlap and len(groups) == 1 and not steps[0].is_settled:
                following = self._launch_overlapped(steps[0], groups[0])
            found = [step.result() for step in steps]
        except BaseException:
            self._cache.lengths[:] = before
            self.drop()
            raise
        if following is not None:
            first = found[0].first()
            following.tokens = {s: int(first[at]) for s, at in following.places.items()}
        self._next = following
        self._runs.end_step()
        steps_of = zip(groups, steps, found, strict=True)
        return [_output(group, step.places, topk) for group, step, topk in steps_of]

    def warm_up(self, adapter: TensorMap) -> None:
        """Run a step of every size that runs have, from the first row on; all rows are empty.

        Args:
            adapter: any LoRA bindings; what is compiled is the same for others.

        Raises:
            BackendError: the device is out of memory.
        """
        counts = range(1, self._cache.rows + 1)
        for count in sorted({self._runs.span(0, count, count).rows for count in counts}):
            self.run([Group({row: RowInput(row, 0) for row in range(count)}, adapter)])
            self._cache.lengths[:] = 0

    @property
    def overlap(self) -> bool:
        """Whether a run goes on by itself while the host does something else."""
        return self._runs.overlap

    @property
    def may_launch(self) -> bool:
        """Whether it does, and the next step was not launched."""
        return self.overlap and self._next is None

    def launch_next(self, group: Group) -> None:
        """Launch the next step, if there is room for it.

        What it finds is taken by `run` if that asks for these tokens; what it fails of, `run` meets
        itself.
        """
        with suppress(BackendError, TensorError):
            self._next = self._launch(group)

    def settle(self) -> None:
        """Wait for the overlapping step; what it found, or failed of, is kept for who asks."""
        if self._next is not None:
            self._next.settle()

    def drop(self) -> None:
        """Wait for what is under way and forget it: the next step is made anew."""
        self._next = None
        self._runs.discard()

    def _begin(self, groups: Sequence[Group]) -> list[_Step]:
        """Launch what is not under way, and lengthen rows: other groups' runs write behind them."""
        reused, steps = self._reuse_overlapped(groups), list[_Step]()
        for group in groups:
            steps.append(reused or self._launch(group))
            self._cache.lengths[[told.row for told in group.rows.values()]] += 1
        return steps

    def _reuse_overlapped(self, groups: Sequence[Group]) -> _Step | None:
        """The overlapping step, if it is the one that is asked for."""
        step = self._next
        if step is None:
            return None
        tokens = {s: told.token for group in groups for s, told in group.rows.items()}
        is_same = len(groups) == 1 and groups[0].adapter is step.adapter
        if not is_same or not step.tokens.items() >= tokens.items():
            self.drop()
            return None
        if len(step.tokens) > len(tokens):
            step.settle()  # the next one is of fewer rows
        return step

    def _launch(self, group: Group) -> _Step:
        sequences = sorted(group.rows, key=lambda sequence: group.rows[sequence].row)
        told = [group.rows[sequence] for sequence in sequences]
        first, count = told[0].row, told[-1].row + 1 - told[0].row
        span = self._runs.span(first, count, len(told))
        self._cache.check_room(span.first, np.ones(span.rows, np.int64))
        run, offsets = self._runs.take(span, group.adapter), [row.row - span.first for row in told]
        at = slice(offsets[0], offsets[0] + count) if count == len(told) else offsets
        run.inputs[INPUT_IDS][at, 0] = [row.token for row in told]
        run.inputs[TEMPERATURES][at] = [row.temperature for row in told]
        run.inputs[LENGTHS][:] = self._cache.lengths[span.first : span.end]
        if SOURCE_LENGTHS in run.inputs:
            run.inputs[SOURCE_LENGTHS][:] = self._cache.source_lengths[span.first : span.end]
        _write_slots(run, at, told)
        if span.kept < span.rows:
            run.inputs[KEPT_PLACES][:] = offsets
            offsets = [*range(span.kept)]
        run.enqueue()
        tokens = {sequence: row.token for sequence, row in group.rows.items()}
        places = dict(zip(sequences, offsets, strict=True))
        return _Step(run, span, group.adapter, places, tokens)

    def _launch_overlapped(self, step: _Step, group: Group) -> _Step | None:
        """The next step of the same rows, if all that it runs have room for another token."""
        span, at = step.span, [step.places[sequence] for sequence in group.rows]
        lengths = self._cache.lengths[span.first : span.end]
        if int(lengths.max()) >= self._cache.max_len:
            return None
        step.run.inputs[LENGTHS][:] = lengths
        step.run.inputs[TEMPERATURES][:] = 0
        _write_slots(step.run, at, [*group.rows.values()])
        step.run.enqueue(is_fed=True)
        return _Step(step.run, span, step.adapter, step.places)


def _write_slots(run: TopKRun, at: slice | list[int], rows: Sequence[RowInput]) -> None:
    """Say which adapter each row takes, where the run asks; an idle row takes the base model."""
    if LORA_SLOT in run.inputs:
        run.inputs[LORA_SLOT][:] = BASE_SLOT
        run.inputs[LORA_SLOT][at] = [row.slot for row in rows]


def _output(group: Group, places: Mapping[Any, int], found: TopK) -> StepOutput:
    """What is found for sequences, by their places among the rows of a run."""
    ordered = sorted(group.rows, key=places.__getitem__)
    return StepOutput(tuple(ordered), found.select([places[sequence] for sequence in ordered]))
