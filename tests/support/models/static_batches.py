"""Sequences on the tiny static engine: prompts, answers, and what their cache should hold."""

from collections.abc import Sequence

import numpy as np
from support.fakes.tiny_engine import EMBEDDING
from support.steps import step_of

from trt_lora.runtime import SamplingParams
from trt_lora.runtime.generation.decoding.rows import Rows
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.serving.scheduler import Scheduler

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9]]


def greedy(count: int) -> SamplingParams:
    """So many tokens, whatever they are."""
    return SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)


def answers_of(batch: Scheduler) -> dict[int, list[int]]:
    """Run a batch to its end."""
    answers: dict[int, list[int]] = {}
    drain(batch, answers)
    return answers


def drain(batch: Scheduler, answers: dict[int, list[int]]) -> None:
    """Run a batch to its end, and add what it returns."""
    while batch:
        keep(step_of(batch), answers)


def keep(tokens: Sequence[Token], answers: dict[int, list[int]]) -> None:
    """Add what a step has returned."""
    for token in tokens:
        if token.token_id is not None:
            answers.setdefault(token.sequence_id, []).append(token.token_id)


def rows_of(batch: Scheduler) -> Rows:
    """The rows of a scheduler."""
    return batch._rows


def check_cache(batch: Scheduler, answers: dict[int, list[int]]) -> None:
    """Assert that every row holds its own tokens, each at its place, and no two are one's."""
    cache = rows_of(batch).cache
    cache.check_integrity()
    for place, row in enumerate(sequence.id for sequence in rows_of(batch).sequences):
        ids = [*PROMPTS[row % len(PROMPTS)], *answers.get(row, [])][: cache.lengths[place]]
        assert len(ids) == cache.lengths[place]
        expected = EMBEDDING[ids] + 0.1 * np.arange(len(ids))[:, None]
        for view in cache.views(place, 1).values():
            np.testing.assert_allclose(view.numpy()[0, 0, : len(ids)], expected, rtol=1e-5)


def is_ahead(batch: Scheduler) -> bool:
    """Whether a step was launched that was not asked for."""
    return rows_of(batch)._decoder.steps._next is not None
