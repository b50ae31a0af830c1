"""Who floods the server takes slot and rows from others for no longer than is stated."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.fakes.slot_engine import expected_answer
from support.load.inside import Inside, inside
from support.served_engines import Gated, MakeGated
from support.web_server import COMPLETIONS

from trt_lora.runtime import SamplingParams
from trt_lora.runtime.server.admission import AdmissionConfig
from trt_lora.runtime.serving.serving_config import ServingConfig

PROMPT, LONG, SHORT = [1, 2, 3], 25, 4  # tokens of an answer
FLOOD, TOGETHER = 1000, 50  # requests, and how many of them in a body
BOUNDS = ServingConfig(max_wait_steps=4, preempt_after=6)
COMES = 2  # runs: the one under way when it came, and that of its prompt


@pytest.fixture
def opened() -> Iterator[Inside]:
    with inside() as found:
        yield found


def asked(
    gated: Gated, opened: Inside, pool: ThreadPoolExecutor, key: str = "x", **body: Any
) -> Future[httpx.Response]:
    """A request that the engine has."""
    before = opened.newest
    fields = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True, **body}
    headers = {"authorization": f"Bearer {key}"}
    future = pool.submit(gated.web.client.post, COMPLETIONS, json=fields, headers=headers)
    assert eventually(lambda: opened.newest is not before)
    return future


def let_one(gated: Gated) -> None:
    """Let the engine run once; it is at the gate again."""
    runs = gated.engine.steps
    gated.engine.let(1)
    assert eventually(lambda: gated.engine.steps > runs and gated.engine.waits)


def runs_until_answered(gated: Gated, opened: Inside) -> int:
    """Let the engine run until the newest request has a token, and return how often it has.

    Its response is not waited for: the engine is at the gate again before it has come.
    """
    newest, start = opened.newest, gated.engine.steps
    assert newest is not None
    while not newest.answer:
        let_one(gated)
    return gated.engine.steps - start


def test_one_b_among_as_in_one_slot_has_it_within_the_stated_steps(
    make_gated: MakeGated, opened: Inside
) -> None:
    gated = make_gated(rows=2, max_loras=1, serving=BOUNDS)
    with ThreadPoolExecutor(8) as pool:
        assert gated.web.answer(COMPLETIONS, prompt=PROMPT, model="1", max_tokens=1)
        gated.engine.shut()
        flood = [asked(gated, opened, pool, model="1", max_tokens=LONG) for _ in range(6)]
        assert eventually(lambda: gated.engine.waits)
        b = asked(gated, opened, pool, model="2", max_tokens=1)
        most = BOUNDS.max_wait_steps + BOUNDS.preempt_after + COMES
        assert runs_until_answered(gated, opened) <= most < LONG  # the As were preempted, and go on
        gated.engine.let()
        for number, tokens, answer in [(2, 1, b), *((1, LONG, each) for each in flood)]:
            assert answer.result().status_code == 200, answer.result().text
            sampling = SamplingParams(temperature=0, max_tokens=tokens)
            ids = answer.result().json()["choices"][0]["token_ids"]
            assert ids == expected_answer(PROMPT, number, sampling)
    opened.check_integrity()


@pytest.mark.parametrize("queue", [2 * FLOOD, None], ids=["all wait", "most are refused"])
def test_one_request_beside_a_flood_has_the_next_row_that_comes_free(
    make_gated: MakeGated, opened: Inside, queue: int | None
) -> None:
    gated = make_gated(rows=2, admission=AdmissionConfig(max_num_queued_reqs=queue))
    bodies = [[PROMPT] * TOGETHER] * (FLOOD // TOGETHER) if queue else [PROMPT] * FLOOD
    with ThreadPoolExecutor(len(bodies) if queue else 40) as pool, ThreadPoolExecutor() as other:
        gated.engine.shut()
        flood = [
            pool.submit(
                gated.web.client.post,
                COMPLETIONS,
                json={"prompt": prompt, "max_tokens": SHORT, "temperature": 0},
                headers={"authorization": "Bearer a"},
            )
            for prompt in bodies
        ]
        most = FLOOD if queue else 2 + 8 * 2
        assert eventually(lambda: len(gated.web.running.client) == most)
        refused = 0 if queue else FLOOD - most
        assert eventually(lambda: sum(future.done() for future in flood) == refused)
        for _ in range(2 * SHORT):
            let_one(gated)
        b = asked(gated, opened, other, key="b", max_tokens=1)
        assert runs_until_answered(gated, opened) <= SHORT + 1  # one answer's turn
        assert b.result().status_code == 200, b.result().text
        gated.engine.let()
        statuses = Counter(future.result().status_code for future in flood)
    assert statuses == Counter({200: len(flood) - refused, 503: refused})
    opened.check_integrity()
