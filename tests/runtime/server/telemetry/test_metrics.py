"""What Prometheus and routers are told."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.eventually import eventually
from support.served_engines import Gated, MakeGated, Spoken
from support.web_server import COMPLETIONS, Web, web_server

PROMPT = [1, 2, 3]


def series(web: Web, name: str) -> dict[str, float]:
    """The series of a metric, by their labels."""
    text = web.client.get("/metrics").text
    found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def lora_labels(web: Web) -> dict[str, str]:
    """The labels of the one series about adapters."""
    (labels,) = series(web, "vllm:lora_requests_info")
    return dict(re.findall(r'(\w+)="([^"]*)"', labels))


def test_answers_are_counted_by_tokens_reason_and_time(spoken: Spoken) -> None:
    with web_server(spoken.config()) as web:
        web.answer(COMPLETIONS, prompt=PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        web.events(COMPLETIONS, prompt=PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        base = 'engine="0",model_name="base"'
        assert series(web, "vllm:prompt_tokens_total") == {base: 6}
        assert series(web, "vllm:generation_tokens_total") == {base: 8}
        length = 'engine="0",finished_reason="length",model_name="base"'
        assert series(web, "vllm:request_success_total") == {length: 2}
        for name, count in (
            ("time_to_first_token", 2),
            ("e2e_request_latency", 2),
            ("inter_token_latency", 6),
        ):
            assert series(web, f"vllm:{name}_seconds_count") == {base: count}, name
        assert series(web, "vllm:num_requests_running") == {base: 0}


def test_running_adapters_are_those_a_step_can_use_and_waiting_ones_are_wanted(
    make_gated: MakeGated,
) -> None:
    gated = make_gated(rows=2)
    assert lora_labels(gated.web) | {"max_lora": ""} == {
        "max_lora": "",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "",
    }
    for name in "12":
        gated.web.answer(COMPLETIONS, prompt=PROMPT, model=name, max_tokens=1)
    assert lora_labels(gated.web) == {  # idle, and there
        "max_lora": "2",
        "running_lora_adapters": "1,2",
        "waiting_lora_adapters": "",
    }
    gated.engine.shut()
    with waiting(gated, "base"), waiting(gated, "3"):  # whose step is at the gate
        assert lora_labels(gated.web)["waiting_lora_adapters"] == "3"
        gated.engine.let()


@contextmanager
def waiting(gated: Gated, model: str) -> Iterator[None]:
    """A stream that has no token yet; one step is at the gate."""
    body = {"prompt": PROMPT, "model": model, "stream": True, "max_tokens": 1}
    with gated.web.client.stream("POST", COMPLETIONS, json=body):
        assert eventually(lambda: gated.engine.waits)
        yield


def test_the_number_of_series_does_not_grow_with_adapters(spoken: Spoken) -> None:
    with web_server(spoken.config()) as web:
        lines = {len(web.client.get("/metrics").text.splitlines())}
        for number in range(20):
            path = str(spoken.adapters["a"])
            web.post("/v1/load_lora_adapter", lora_name=f"x{number}", lora_path=path)
            web.answer(COMPLETIONS, prompt=PROMPT, model=f"x{number}", max_tokens=1)
            lines.add(len(web.client.get("/metrics").text.splitlines()))
        assert len(lines) <= 3  # the reasons of ends, once
        levels = series(web, "trt_lora:adapters")
        assert sum(levels.values()) == 20
        assert levels['engine="0",level="slot",model_name="base"'] == 2


@pytest.mark.parametrize("kind", ["json", "TEXT"])
def test_an_answer_has_the_load_in_a_header_where_that_is_asked_for(web: Web, kind: str) -> None:
    headers = {"endpoint-load-metrics-format": kind}
    body = {"prompt": PROMPT, "max_tokens": 1}
    report = web.client.post(COMPLETIONS, json=body, headers=headers).headers[
        "endpoint-load-metrics"
    ]
    if kind == "TEXT":
        assert re.fullmatch(
            r"TEXT named_metrics.kv_cache_usage_perc=[\d.]+, "
            r"named_metrics.num_requests_waiting=0.0",
            report,
        )
    else:
        assert json.loads(report.removeprefix("JSON "))["named_metrics"].keys() == {
            "kv_cache_usage_perc",
            "num_requests_waiting",
        }
    assert "endpoint-load-metrics" not in web.client.post(COMPLETIONS, json=body).headers


def test_the_rows_in_use_are_told_while_they_are(make_gated: MakeGated) -> None:
    gated = make_gated(rows=2)
    gated.engine.shut()
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 20, "ignore_eos": True}
    with gated.web.client.stream("POST", COMPLETIONS, json=body):
        gated.engine.let(4)
        name = "vllm:num_requests_running"
        assert eventually(lambda: list(series(gated.web, name).values()) == [1])
        assert list(series(gated.web, "vllm:kv_cache_usage_perc").values()) == [0.5]
        gated.engine.let()
    assert eventually(lambda: list(series(gated.web, name).values()) == [0])
