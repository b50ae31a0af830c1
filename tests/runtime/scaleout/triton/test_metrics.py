"""Metrics of Triton's model: the server's names, and one series of what lies in slots."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from support.eventually import eventually
from support.fakes.fake_triton import FakeRequest, MetricFamily
from support.fakes.gated_engine import GatedEngine

from trt_lora.runtime.scaleout.triton.metrics import Sample, TritonMetrics


def shown(model: str) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    """Values by name, each with the labels that are its own."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in MetricFamily.shown:
        for metric in family.metrics:
            labels = dict(metric.labels)
            if labels.pop("model_name") == model:
                assert labels.pop("engine") == "0"
                found.setdefault(family.name, []).append((labels, metric.value))
    return found


def asked(number: int) -> FakeRequest:
    name = np.array([f"{number}.safetensors".encode()], np.object_)
    return FakeRequest({"input_ids": np.array([5, 6]), "lora_name": name})


def test_requests_adapters_and_tokens_are_told(
    make_model: Callable[..., Any], gated: GatedEngine
) -> None:
    model = make_model()

    def values(name: str) -> dict[str, float]:
        return {"".join(labels.values()): value for labels, value in shown("many").get(name, [])}

    first = asked(1)
    model.execute([first])
    assert not first.error
    assert eventually(lambda: values("vllm:generation_tokens_total") == {"": 13})  # one ends it
    assert values("vllm:prompt_tokens_total") == {"": 2}
    gated.shut()
    model.execute([asked(1), asked(2), asked(3)])

    def are_two() -> bool:
        """Let a step be made: the second request joins when its adapter was read."""
        gated.let(1)
        return eventually(lambda: values("vllm:num_requests_running") == {"": 2}, 0.5)

    assert any(are_two() for _ in range(12))
    assert eventually(lambda: values("vllm:num_requests_waiting") == {"": 1})
    assert eventually(lambda: values("vllm:kv_cache_usage_perc") == {"": 1})
    ended = {"stop": 1, "length": 0, "abort": 0, "error": 0}
    assert values("vllm:request_success_total") == ended
    levels = {"disk": 0, "memory": 1, "slot": 2}
    assert eventually(lambda: values("trt_lora:adapters") == levels)
    ((labels, time),) = shown("many")["vllm:lora_requests_info"]
    told = [labels[f"{state}_lora_adapters"].split(",") for state in ("running", "waiting")]
    assert [len(names) for names in told] == [2, 1]
    assert sorted([*told[0], *told[1]]) == [f"{number}.safetensors" for number in (1, 2, 3)]
    assert labels["max_lora"] == "2"
    assert time > 1.7e9


def test_of_residents_there_is_one_series_however_often_they_change() -> None:
    metrics = TritonMetrics(MetricFamily, "changing")
    for number in range(5):
        metrics.publish([Sample("vllm:lora_requests_info", number, {"running": str(number)})])
    ((labels, value),) = shown("changing")["vllm:lora_requests_info"]
    assert (labels, value) == ({"running": "4"}, 4)


def test_counts_grow_by_what_is_new() -> None:
    metrics, name = TritonMetrics(MetricFamily, "counting"), "vllm:request_success_total"
    counts = Counter({"stop": 2})
    for _ in range(2):
        metrics.publish(Sample(name, n, {"reason": reason}) for reason, n in counts.items())
        counts += Counter({"stop": 3, "length": 1})
    assert sorted(value for _, value in shown("counting")[name]) == [1, 5]
    (kind,) = {family.kind for family in MetricFamily.shown if family.name == name}
    assert kind == MetricFamily.COUNTER


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> None:
    """Series go with their models, whose families nobody else keeps."""
    assert not shown("changing")
    assert not shown("counting")
