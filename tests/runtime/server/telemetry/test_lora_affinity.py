"""llm-d's LoRA-affinity scorer, ported, sends requests to the servers where their adapters are.

After `loraspec.go` and `extractor.go`, which pick the newest series, and `lora_affinity.go` of
llm-d-router.
"""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.served_engines import Gated, MakeGated, waiting
from support.web_server import COMPLETIONS

PROMPT = [1, 2, 3]


def score(text: str, model: str) -> float:
    """What a router thinks of a server for a model, by the server's metrics."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    newest = max(families["vllm:lora_requests_info"].samples, key=lambda sample: sample.value)
    running, waiting = (
        {name.strip() for name in newest.labels[f"{kind}_lora_adapters"].split(",") if name.strip()}
        for kind in ("running", "waiting")
    )
    if model in running:
        return 1.0
    if len(running | waiting) < int(newest.labels["max_lora"]):
        return 0.8
    return 0.6 if model in waiting else 0.0


def scores(gated: Gated) -> dict[str, float]:
    text = gated.web.client.get("/metrics").text
    return {model: score(text, model) for model in "123"}


def test_a_router_finds_the_server_where_an_adapter_is(make_gated: MakeGated) -> None:
    gated = make_gated(rows=2)
    assert scores(gated) == {"1": 0.8, "2": 0.8, "3": 0.8}  # two slots, both free
    gated.web.answer(COMPLETIONS, prompt=PROMPT, model="1", max_tokens=1)
    assert scores(gated) == {"1": 1.0, "2": 0.8, "3": 0.8}  # idle, and there
    gated.web.answer(COMPLETIONS, prompt=PROMPT, model="2", max_tokens=1)
    assert scores(gated) == {"1": 1.0, "2": 1.0, "3": 0.0}
    with waiting(gated), waiting(gated, model="3"):
        assert scores(gated) == {"1": 1.0, "2": 1.0, "3": 0.6}
        gated.engine.let()
    gated.web.answer(COMPLETIONS, prompt=PROMPT, model="3", max_tokens=1)
    assert sorted(scores(gated).values()) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("lora", [[{"name": "1", "scale": 0.5}], [{"name": "1"}, {"name": "2"}]])
def test_what_a_blend_is_made_of_is_waited_for_and_the_blend_is_no_adapter(
    make_gated: MakeGated, lora: list[dict[str, object]]
) -> None:
    gated = make_gated(rows=2)
    with waiting(gated), waiting(gated, lora=lora):
        text = gated.web.client.get("/metrics").text
        wanted = ",".join(str(part["name"]) for part in lora)
        assert f'waiting_lora_adapters="{wanted}"' in text
        for part in lora:
            known = gated.web.client.get(f"/v1/lora_adapters/{part['name']}").json()
            assert (known["running"], known["waiting"]) == (0, 1)
        gated.engine.let()
    gated.web.answer(COMPLETIONS, prompt=PROMPT, lora=lora, max_tokens=1)
    assert 'running_lora_adapters=""' in gated.web.client.get("/metrics").text
