"""Tokens on their way to who asked: when they are told, and the times that they tell."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.server.answers.choices import Choice
from trt_lora.runtime.server.answers.encoding import EncodedPrompt
from trt_lora.runtime.server.answers.running_answer import RunningAnswer
from trt_lora.runtime.server.engine_process.wire import RequestTimes


def test_times_are_those_that_the_engine_has_measured() -> None:
    choice = Choice(EncodedPrompt([5]))
    assert choice.told_times() == {}
    choice.add(Token(0, 7))
    choice.times = RequestTimes(None, 0, 2.0, 1.5, 1.0, 0.0)
    assert choice.told_times() == {
        "time_to_first_token_ms": 1000,
        "generation_time_ms": 0,
        "queue_time_ms": 2000,
        "tokens_per_second": 1,
    }
    choice.add(Token(0, 8))
    choice.add(Token(0, 9, "length"))
    choice.times = RequestTimes(None, 0, 2.0, 1.5, 1.0, 1.0)
    assert choice.told_times() == {
        "time_to_first_token_ms": 1000,
        "generation_time_ms": 1000,
        "queue_time_ms": 2000,
        "mean_itl_ms": 500,
        "tokens_per_second": 1.5,
    }


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 8), (3, [1, 3, 3, 1]), (9, [1, 7])])
def test_tokens_come_so_many_at_a_time(interval: int, sizes: list[int]) -> None:
    tokens = [Token(0, n, "length" if n == 8 else None, text="x") for n in range(1, 9)]

    async def take() -> list[tuple[int, Token]]:
        return [(0, tokens.pop(0))]

    nothing: Any = SimpleNamespace(  # as answers, ticket and metrics
        take=take,
        times={},
        seconds_left=None,
        begin=lambda: None,
        first_token=lambda seconds, tokens: None,
    )
    choice = Choice(EncodedPrompt([5]))
    running = RunningAnswer(
        nothing,
        nothing,
        [choice],
        nothing,
        field="model",
        start=0.0,
        record=nothing,
        interval=interval,
    )

    async def all_sizes() -> list[int]:
        found = []
        while not running.is_over:
            found += [len(some) for some in (await running.take()).values()]
        return found

    assert asyncio.run(all_sizes()) == sizes
