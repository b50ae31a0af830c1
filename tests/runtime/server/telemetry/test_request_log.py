"""A line of each request when it ends, and no secret in it."""

import hashlib
import json
import logging
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.eventually import eventually
from support.fakes.slot_engine import POISON, number_file
from support.served_engines import MakeGated, Spoken
from support.unopened_server import asked
from support.web_server import CHATS, COMPLETIONS, Web, posted, web_server

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.server import log_lines
from trt_lora.runtime.server.guard import GuardConfig
from trt_lora.runtime.server.log_lines import FORMATS, LogConfig, with_facts
from trt_lora.runtime.server.telemetry.request_log import RequestLogConfig

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
PROMPT = [1, 2, 3]


class Kept(logging.Handler):
    """The records of the log of requests, and all of them as they are written."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.formatters = [log_lines._FORMATS[name]() for name in FORMATS]
        self.facts: list[Mapping[str, Any]] = []
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += "\n".join(each.format(record) for each in self.formatters) + "\n"
        if record.levelno >= logging.INFO and record.name == "trt_lora.requests":
            self.facts.append(vars(record)["facts"])


@pytest.fixture
def log() -> Iterator[Kept]:
    """Whatever is logged from now on, at every level."""
    kept, root, ours = Kept(), logging.getLogger(), logging.getLogger("trt_lora")
    levels = root.level, ours.level
    root.addHandler(kept)
    root.setLevel(logging.DEBUG)
    ours.setLevel(logging.DEBUG)
    yield kept
    root.removeHandler(kept)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def lines(log: Kept, count: int) -> Sequence[Mapping[str, Any]]:
    """So many lines of requests, which may come a moment after their answers."""
    assert eventually(lambda: len(log.facts) >= count)
    return log.facts


def test_who_is_refused_at_the_door_and_who_leaves_are_told_as_such(
    spoken: Spoken, log: Kept
) -> None:
    with web_server(spoken.config(), GuardConfig(api_keys=("k",))) as web:
        web.client.get("/v1/models")
        web.client.get("/v1/models", headers={"host": "evil.example"})
        with socket.create_connection(web.address) as made:
            made.sendall(posted(COMPLETIONS, "{", "Authorization: Bearer k", length=9))
            assert eventually(lambda: web.draining.server_state.tasks)
        found = [(line["status"], line["error"]) for line in lines(log, 3)]
    assert found == [(401, "Unauthorized"), (400, "BadRequestError"), (499, "ClientClosedRequest")]
    assert "Traceback" not in log.text


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_tells_who_asked_what_came_of_it_and_how_long_it_took(
    spoken: Spoken, log: Kept, streamed: bool
) -> None:
    modules = [("a", str(spoken.adapters["a"]))]
    with web_server(spoken.config(lora_modules=modules)) as web:
        body = {"prompt": [PROMPT, [*PROMPT, 4]], "model": "a", "stream": streamed, **GREEDY}
        response = web.post(COMPLETIONS, **body)
        (found,) = lines(log, 1)
        assert found["id"] in response.text
        told = {"client": "127.0.0.1", "method": "POST", "path": COMPLETIONS, "status": 200}
        told |= {"model": "a", "adapter": "a", "version": 1, "reason": "length"}
        told |= {"prompt_tokens": 7, "tokens": 8}
        assert told.items() <= found.items()
        assert not found.keys() & {"error", "param"}
        assert found["cached_tokens"] in (0, 2)  # whether they came at the same step
        parts = [found[name] for name in ("queue_s", "prefill_s", "decode_s")]
        assert all(seconds >= 0 for seconds in parts)
        assert found["load_s"] <= found["queue_s"]
        assert 0 < found["prefill_s"] <= found["first_token_s"] < found["total_s"]
        assert max(parts) <= found["total_s"]


def test_what_is_refused_tells_why_and_what_only_looks_is_told_to_who_debugs(
    spoken: Spoken, log: Kept
) -> None:
    guard = GuardConfig(api_keys=("one",))
    with web_server(spoken.config(), guard) as web:
        web.post(COMPLETIONS, prompt=PROMPT)  # without a key
        web.client.headers["authorization"] = "Bearer one"
        web.post(COMPLETIONS, prompt=PROMPT, model="no such")
        web.post(CHATS, messages="no list")
        web.post(COMPLETIONS, prompt=PROMPT, top_p=2)
        web.client.get("/v1/models")
        web.client.get("/nowhere")
        found = lines(log, 5)
        assert '"path": "/v1/models", "status": 200' in log.text
    key = hashlib.sha256(b"Bearer one").hexdigest()[:16]
    assert [each["client"] for each in found] == ["127.0.0.1", *[key] * 4]
    names = ("status", "error", "param", "model")
    assert [tuple(map(each.get, names)) for each in found] == [
        (401, "Unauthorized", None, None),
        (404, "NotFoundError", "model", "no such"),
        (400, "Bad Request", "body.messages", None),
        (400, "BadRequestError", "top_p", "base"),
        (404, "NotFoundError", None, None),
    ]


def test_an_answer_that_nobody_waits_for_and_one_that_fails_are_told_as_such(
    make_gated: MakeGated, tmp_path: Path, log: Kept
) -> None:
    path = str(number_file(tmp_path, POISON))
    gated = make_gated(lora_modules=[("nan", path)])
    gated.web.refusal(COMPLETIONS, 500, prompt=PROMPT, model="nan", **GREEDY)
    gated.web.events(COMPLETIONS, prompt=PROMPT, model="nan", **GREEDY)
    gated.engine.shut()
    made = socket.create_connection(gated.web.address, timeout=60)
    made.sendall(posted(COMPLETIONS, json.dumps({"prompt": PROMPT, **GREEDY})))
    assert eventually(lambda: gated.engine.waits)
    made.close()
    found = lines(log, 3)
    gated.engine.let()
    names = ("status", "error", "reason", "tokens")
    assert [tuple(map(each.get, names)) for each in found] == [
        (500, "InternalServerError", "error", 0),
        (200, "InternalServerError", "error", 0),
        (499, None, "abort", 0),
    ]


def test_no_prompt_no_answer_and_no_key_is_told_anywhere(spoken: Spoken, log: Kept) -> None:
    """Each secret is in what was asked or answered, and none in log, metrics or errors."""
    keys = ("sk-planted-key", "sk-planted-admin")
    guard = GuardConfig(api_keys=keys[:1], admin_key=keys[1])
    secret, wrong = "cat dog cat dog dog", "sk-planted-wrong"
    bad: list[dict[str, Any]] = [
        {"prompt": secret, "stop": [secret] * 17},
        {"prompt": [secret, 7]},
        {"prompt": [1, secret]},
        {"prompt": secret * 10_000},
        {"prompt": secret, "max_tokens": secret},
        {"prompt": secret, "echo": 7},
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": [{"role": 7, "content": secret}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": secret}]}]},
    ]
    with web_server(spoken.config(), guard) as web:
        errors = ""
        for key in (*keys, wrong):
            headers = {"authorization": f"Bearer {key}"}
            for body in bad:
                path = CHATS if "messages" in body else COMPLETIONS
                errors += web.client.post(path, json=body, headers=headers).text
            for raw in (
                f'{{"prompt": "{secret}"',
                f'"{secret}"',
                f'{{"prompt": "{secret}\udc00"}}',
            ):
                content = raw.encode(errors="surrogatepass")
                kind = {"content-type": "application/json", **headers}
                errors += web.client.post(COMPLETIONS, content=content, headers=kind).text
            for path in ("/v1/load_lora_adapter", "/v1/lora_adapters/x/pin", "/nowhere"):
                errors += web.client.post(path, json={"lora_name": 7}, headers=headers).text
        web.client.headers["authorization"] = f"Bearer {keys[0]}"
        body = {"messages": [{"role": "user", "content": secret}], **GREEDY, "logprobs": True}
        answer = web.answer(CHATS, **body)["choices"][0]["message"]["content"]
        web.events(COMPLETIONS, prompt=secret, model="base", **GREEDY)
        assert len(answer.split()) > 1
        metrics = web.client.get("/metrics").text
        assert eventually(lambda: len(log.facts) >= 3 * (len(bad) + 6) + 2)
    for planted in (secret, answer, *keys, wrong):
        for place in (log.text, metrics, errors):
            assert planted not in place
            assert json.dumps(planted)[1:-1] not in place


def test_lines_are_left_out_where_that_is_asked_for(spoken: Spoken, log: Kept) -> None:
    for config in (RequestLogConfig(has_lines=False), RequestLogConfig(quiet_paths=[COMPLETIONS])):
        with web_server(spoken.config(), requests=config) as web:
            web.answer(COMPLETIONS, prompt=PROMPT, **GREEDY)
            web.post("/nowhere")
    assert [found["path"] for found in lines(log, 1)] == ["/nowhere"]


def test_a_line_is_one_line_whatever_a_client_calls_things(log: Kept) -> None:
    path = "/a%0a2026-11-25T00:00:00.000Z%20INFO%20x:%20request%20status=200"
    headers = {"x-request-id": 'a" status=200'}
    asked(GuardConfig(), "GET", path, headers)
    text, told = log.text.splitlines()[-2:]
    assert json.loads(told)["path"].startswith("/a\n2026")
    assert json.loads(told)["id"] == headers["x-request-id"]
    assert re.sub(r'"(\\.|[^"\\])*"', "", text).count("status=") == 1


def test_a_request_has_its_number_back_where_that_is_asked_for(log: Kept) -> None:
    guard, returns = GuardConfig(api_keys=("one",)), RequestLogConfig(returns_ids=True)
    mine = {"x-request-id": "mine"}
    for path in ("/version", "/v1/models", "/nowhere"):  # refused or not
        response = asked(guard, "GET", path, mine, requests=returns)
        assert response.headers["x-request-id"] == "mine"
    made = [asked(guard, "GET", "/no", requests=returns).headers["x-request-id"] for _ in range(2)]
    assert [each["id"] for each in log.facts[-2:]] == made
    assert len(made[0]) >= 16
    assert made[0] != made[1]
    assert "x-request-id" not in asked(GuardConfig(), "GET", "/version", mine).headers


def test_the_same_number_is_in_header_answer_and_line(spoken: Spoken, log: Kept) -> None:
    with web_server(spoken.config(), requests=RequestLogConfig(returns_ids=True)) as web:
        response = web.post(COMPLETIONS, prompt=PROMPT, **GREEDY)
        (found,) = lines(log, 1)
    assert response.json()["id"] == found["id"] == f"cmpl-{response.headers['x-request-id']}"


def test_each_format_writes_facts_and_tracebacks(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("x.y", logging.ERROR, "", 0, "a %s", ("b",), None)
    vars(record).update(with_facts({"n": 1, "of": "two words", "name": "a/b:c"}))
    text, told = (log_lines._FORMATS[name]().format(record) for name in ("text", "json"))
    assert re.fullmatch(r'\S+Z ERROR x\.y: a b n=1 of="two words" name=a/b:c', text)
    found = json.loads(told)
    moment = found.pop("time")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", moment)
    assert found == {
        "level": "error",
        "logger": "x.y",
        "message": "a b",
        "n": 1,
        "of": "two words",
        "name": "a/b:c",
    }
    record.exc_info = (ValueError, ValueError("why"), None)
    assert log_lines._FORMATS["text"]().format(record).endswith("\nValueError: why")
    assert json.loads(log_lines._FORMATS["json"]().format(record))["exception"].endswith("why")


@pytest.mark.parametrize("fields", [{"log_format": "xml"}, {"log_level": "INFO"}])
def test_another_format_or_level_is_refused(fields: Mapping[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ConfigError, match=f"{name} is '{fields[name]}'; expected"):
        LogConfig(**fields)


def test_lines_of_requests_at_a_time_are_whole(spoken: Spoken, log: Kept) -> None:
    def ask(web: Web) -> str:
        return str(web.answer(COMPLETIONS, prompt=PROMPT, **GREEDY)["id"])

    with web_server(spoken.config()) as web, ThreadPoolExecutor() as pool:
        made = [pool.submit(ask, web) for _ in range(12)]
        assert {each.result() for each in made} == {each["id"] for each in lines(log, 12)}
