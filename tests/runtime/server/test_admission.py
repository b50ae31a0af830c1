"""Who is refused because others wait, how long anybody waits, and what is counted meanwhile."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.served_engines import Gated, MakeGated, hold_submits
from support.web_server import COMPLETIONS, refused

from trt_lora.runtime.server.admission import AdmissionConfig

PROMPT = [1, 2, 3]
HEADERS = {"authorization": "Bearer x"}


@dataclass
class Asked:
    """Requests that were sent and are held at the gate."""

    gated: Gated
    pool: ThreadPoolExecutor
    futures: list[Future[httpx.Response]] = field(default_factory=list)

    def ask(self, **body: Any) -> None:
        """Send a request, and wait until it is counted."""
        load = self.gated.web.load
        fields = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **body}
        self.futures.append(
            self.pool.submit(self.gated.web.post, COMPLETIONS, **fields)  # one of its own
        )
        assert eventually(lambda: self.gated.web.load > load)


@contextmanager
def held(gated: Gated) -> Iterator[Asked]:
    """The gate is shut for what is asked; all of it is answered in the end."""
    gated.engine.shut()
    with ThreadPoolExecutor() as pool:
        asked = Asked(gated, pool)
        try:
            yield asked
        finally:
            gated.engine.let()
            assert {future.result().status_code for future in asked.futures} <= {200, 503}
    assert eventually(lambda: gated.web.load == 0)
    assert gated.web.running.admission.tokens == 0


def test_beyond_the_queue_a_request_is_refused_and_counted(make_gated: MakeGated) -> None:
    gated = make_gated(rows=2, admission=AdmissionConfig(max_num_queued_reqs=1))
    with held(gated) as asked:
        for _ in range(3):  # two rows, and one that waits
            asked.ask()
        response = gated.web.post(COMPLETIONS, prompt=PROMPT)
        error = refused(response, 503)
        assert (error["type"], response.headers["retry-after"]) == ("ServiceUnavailableError", "1")
        assert error["message"].startswith("3 requests wait or run, 3 may")
        gated.engine.let()
        assert eventually(lambda: gated.web.load == 0)
    assert gated.web.answer(COMPLETIONS, prompt=PROMPT)["usage"]["prompt_tokens"] == 3
    text = gated.web.client.get("/metrics").text
    assert (
        'admission_rejections_total{engine="0",model_name="base",reason="max_num_queued_reqs"} 1.0'
        in text
    )


def test_by_default_eight_requests_wait_for_each_row(make_gated: MakeGated) -> None:
    gated = make_gated(rows=1)
    with held(gated) as asked:
        asked.ask(n=9, temperature=1)
        assert (
            "9 requests wait or run, 9 may"
            in gated.web.refusal(COMPLETIONS, 503, prompt=[1])["message"]
        )


def test_one_request_that_is_larger_than_the_queue_runs_alone(make_gated: MakeGated) -> None:
    gated = make_gated(rows=1, admission=AdmissionConfig(max_num_queued_reqs=0))
    body = {"prompt": [PROMPT] * 3, "max_tokens": 1, "temperature": 0}
    assert len(gated.web.answer(COMPLETIONS, **body)["choices"]) == 3


def test_prompts_that_wait_are_counted_by_their_tokens_until_they_have_one(
    make_gated: MakeGated,
) -> None:
    gated = make_gated(rows=2, admission=AdmissionConfig(max_num_queued_tokens=4))
    with held(gated) as asked:
        asked.ask(max_tokens=20)
        message = gated.web.refusal(COMPLETIONS, 503, prompt=PROMPT)["message"]
        assert message.startswith("prompts of 3 tokens wait, 4 may")
        gated.engine.let(2)  # it has its first token, and runs on
        assert eventually(lambda: gated.web.running.admission.tokens == 0)
        asked.ask()


def test_a_client_has_so_many_requests_and_others_have_theirs(make_gated: MakeGated) -> None:
    gated = make_gated(admission=AdmissionConfig(max_client_requests=1))
    with held(gated) as asked:
        asked.ask()
        error = gated.web.refusal(COMPLETIONS, 429, prompt=PROMPT)
        assert error["message"].startswith("this client has 1 requests under way, 1 may be")
        gated.web.client.headers.update(HEADERS)  # another client
        asked.ask()


@pytest.mark.parametrize(
    ("body", "what"),
    [({}, "a row"), ({"model": "2"}, "its adapter to be read|a row|a slot")],
    ids=["base", "adapter"],
)
def test_who_waits_too_long_is_told_for_what(
    make_gated: MakeGated, body: dict[str, str], what: str
) -> None:
    gated = make_gated(rows=1, admission=AdmissionConfig(queue_timeout_s=0.3))
    gated.engine.shut()
    message = gated.web.refusal(COMPLETIONS, 503, prompt=PROMPT, **body)["message"]
    assert message in {
        f"no token came in time: the request waited for {each}" for each in what.split("|")
    }
    gated.engine.let()
    assert eventually(lambda: gated.web.load == 0)
    assert gated.web.answer(COMPLETIONS, prompt=PROMPT)["choices"]


def test_who_waits_for_the_engine_itself_is_told_so_in_time_too(
    make_gated: MakeGated, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = make_gated(admission=AdmissionConfig(queue_timeout_s=0.2))
    comes = hold_submits(monkeypatch)
    for stream in (False, True):
        message = gated.web.refusal(COMPLETIONS, 503, prompt=PROMPT, stream=stream)["message"]
        assert message.endswith("the request waited for the engine to take it")
    comes.set()
    assert gated.web.answer(COMPLETIONS, prompt=PROMPT)["choices"]
    assert (gated.web.load, len(gated.web.running.client)) == (0, 0)


def test_a_stream_that_waits_too_long_ends_with_an_error_event(make_gated: MakeGated) -> None:
    gated = make_gated(admission=AdmissionConfig(queue_timeout_s=0.3))
    gated.engine.shut()
    (event,) = gated.web.events(COMPLETIONS, prompt=PROMPT)
    assert event["error"]["code"] == 503
    gated.engine.let()


def test_a_server_that_ends_refuses_and_says_so(make_gated: MakeGated) -> None:
    gated = make_gated()
    gated.web.running.admission.refuses = True
    assert "is ending" in gated.web.refusal(COMPLETIONS, 503, prompt=PROMPT)["message"]
    assert gated.web.running.admission.rejections.total() == 1
    assert gated.web.running.admission.rejections["draining"] == 1
    body = {"lora_name": "x", "lora_path": "x"}
    assert "is ending" in gated.web.refusal("/v1/load_lora_adapter", 503, **body)["message"]


def test_a_request_that_is_refused_leaves_nothing_behind(make_gated: MakeGated) -> None:
    gated = make_gated(rows=1, admission=AdmissionConfig(max_num_queued_reqs=0))
    admission = gated.web.running.admission
    with held(gated) as asked:
        asked.ask()
        for _ in range(200):
            gated.web.refusal(COMPLETIONS, 503, prompt=PROMPT)
    assert (admission.requests, dict(admission._clients)) == (0, {})
    assert len(gated.web.running.client) == 0
