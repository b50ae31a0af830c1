"""Which adapter a request means: by its model, and by other clients' ways to say so."""

import json
import re
from typing import Any

import pytest
from support.models.tiny_sizes import POSITIONS
from support.served_engines import Spoken, write_adapter
from support.web_server import CHATS, COMPLETIONS, Web, web_server

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import Engine, SamplingParams
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.server.adapters.served_models import NamedPath
from trt_lora.runtime.server.engine_process.adapter_desk import AdapterDesk

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
SAMPLING = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)


def said(web: Web, **body: Any) -> list[int]:
    answer = web.answer(COMPLETIONS, prompt=PROMPT, return_token_ids=True, **{**GREEDY, **body})
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def expected(twin: Engine, adapter: str | None, scale: float = 1.0) -> list[int]:
    (answer,) = twin.generate([PROMPT], adapter=adapter, scale=scale, sampling=SAMPLING)
    return list(answer.token_ids)


@pytest.mark.parametrize(
    ("body", "adapter"),
    [
        *(({"model": name}, None) for name in ("base", "", None)),
        ({}, None),
        *(({"model": name}, "a") for name in ("a", "base:a")),
        ({"lora_path": "a"}, "a"),
        ({"model": "base", "lora_path": "b"}, "b"),
        ({"model": "b", "lora_path": "b"}, "b"),
        ({"lora_request": {"lora_name": "b", "lora_int_id": 7, "lora_path": "/x"}}, "b"),
        ({"lora_path": "", "lora_request": None}, None),
        ({"lora": []}, None),
        ({"lora": [{"name": "a"}]}, "a"),
        ({"lora": [{"name": "a", "scale": 1}], "model": "base"}, "a"),
    ],
)
def test_an_adapter_is_named_in_several_ways(
    web: Web, twin: Engine, body: dict[str, Any], adapter: str | None
) -> None:
    assert said(web, **body) == expected(twin, adapter)


def test_an_answer_calls_the_model_as_the_request_did(web: Web) -> None:
    for model in ("base", "a", "base:a"):
        assert web.answer(COMPLETIONS, prompt=PROMPT, model=model)["model"] == model
    assert web.answer(COMPLETIONS, prompt=PROMPT)["model"] == "base"


def test_a_strength_is_the_engines(web: Web, twin: Engine) -> None:
    found = {scale: said(web, lora=[{"name": "a", "scale": scale}]) for scale in (0.5, -1.0, 3.0)}
    assert found == {scale: expected(twin, "a", scale) for scale in found}
    assert len({*map(tuple, found.values()), tuple(expected(twin, "a"))}) == 4
    assert said(web, lora=[{"name": "a", "scale": 0}]) == expected(twin, None)


def test_a_blend_is_the_engines(web: Web, twin: Engine) -> None:
    weights = {"b": -0.75, "a": 1.25}
    twin.adapters.blend("both", weights)
    lora = [{"name": name, "scale": scale} for name, scale in weights.items()]
    assert said(web, lora=lora) == said(web, lora=lora[::-1]) == expected(twin, "both")
    assert expected(twin, "both") not in (expected(twin, "a"), expected(twin, "b"))
    twin.adapters.unload("both")


def test_a_blend_is_no_model(web: Web) -> None:
    web.answer(COMPLETIONS, prompt=PROMPT, lora=[{"name": "a"}, {"name": "b", "scale": 2}])
    for path in ("/v1/models", "/v1/lora_adapters"):
        names = {each.get("id") or each.get("name") for each in web.client.get(path).json()["data"]}
        assert names - {"base"} == {"a", "b"}
    for model in ("(a@1.0,b@2)", "(a@1.0,b@2.0)", "a@0.5", "b@2.0"):
        assert web.refusal(COMPLETIONS, 404, prompt=PROMPT, model=model)["param"] == "model"


def test_blends_beyond_those_that_are_kept_answer_as_well(web: Web, twin: Engine) -> None:
    for step in range(30):
        lora = [{"name": "a", "scale": step / 10}, {"name": "b", "scale": 0.5}]
        said(web, lora=lora)
    known = re.findall(r"^trt_lora:adapters{.*} (\S+)$", web.client.get("/metrics").text, re.M)
    assert sum(map(float, known)) == 2  # none of which is a blend
    twin.adapters.blend("first", {"a": 0.0, "b": 0.5})
    lora = [{"name": "a", "scale": 0}, {"name": "b", "scale": 0.5}]
    assert said(web, lora=lora) == expected(twin, "first")
    twin.adapters.unload("first")


def test_the_oldest_blends_go_when_there_are_many(twin: Engine) -> None:
    desk, loaded = AdapterDesk(twin.adapters), set(twin.adapters.names)
    made = [desk.blended({"a": step, "b": 0.5}) for step in range(20)]
    assert set(twin.adapters.names) - loaded == set(made[4:])
    for name in made[4:]:
        twin.adapters.unload(name)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        *(({"model": name}, 404, "model") for name in ("x", "base:x", "x:a", ":a", "A", "a ")),
        ({"model": "base:base"}, 404, "model"),
        ({"model": "x" * 10_000}, 404, "model"),
        ({"lora_path": "x"}, 404, "model"),
        ({"lora_request": {"lora_name": "x"}}, 404, "model"),
        ({"lora_request": {"lora_name": 5}}, 400, "body.lora_request"),
        ({"lora_request": {}}, 400, "body.lora_request"),
        ({"model": "a", "lora_path": "b"}, 400, "model"),
        ({"model": "a", "lora": [{"name": "b"}]}, 400, "lora"),
        ({"lora_path": "a", "lora": [{"name": "b"}]}, 400, "lora"),
        ({"lora": [{"name": "a"}, {"name": "a", "scale": 2}]}, 400, "lora"),
        ({"lora": [{"name": "base"}]}, 400, "lora"),
        ({"lora": [{"name": "x"}]}, 400, "lora"),
        ({"lora": {"name": "x"}}, 400, "lora"),
        ({"lora_path": ["a", "b"]}, 400, "lora_path"),
        ({"lora_path": ["a", None]}, 400, "lora_path"),
        ({"lora_path": ["x"]}, 404, "model"),
        ({"lora": [{"name": "a", "scale": 1e300}]}, 400, "body.lora"),
        ({"lora": [{"name": "a"}, {"name": "b", "scale": -1e30}]}, 400, "body.lora"),
    ],
)
def test_what_names_no_adapter_or_two_is_refused(
    web: Web, body: dict[str, Any], status: int, param: str
) -> None:
    for path, asked in (
        (COMPLETIONS, {"prompt": PROMPT}),
        (CHATS, {"messages": [{"role": "user", "content": "w5"}]}),
    ):
        error = web.refusal(path, status, **asked, **body, max_tokens=1)
        assert error["param"] == param
        assert len(error["message"]) < 400
    if status == 404 and "model" in body:
        named = body["model"][:200]
        assert error["message"] == (f"The model `{named}` does not exist. Valid aliases: base.")


def test_an_unknown_adapter_of_a_blend_is_refused(web: Web) -> None:
    error = web.refusal(COMPLETIONS, 400, prompt=PROMPT, lora=[{"name": "a"}, {"name": "x"}])
    assert "'x'" in error["message"]


def test_a_blend_of_more_ranks_than_the_engine_takes_is_refused(spoken: Spoken) -> None:
    manifest = read_manifest(spoken.engine)
    write_adapter(spoken.root / "wide", manifest, rank=manifest.max_lora_rank)
    modules = [(name, str(spoken.root / name)) for name in ("a", "wide")]
    with web_server(spoken.config(lora_modules=modules)) as web:
        lora = [{"name": "a"}, {"name": "wide"}]
        error = web.refusal(COMPLETIONS, prompt=PROMPT, lora=lora)
        assert error["param"] == "lora"
        assert all(number in error["message"] for number in ("20", "16"))


def test_several_names_of_the_base_model_are_all_its_own(spoken: Spoken) -> None:
    modules = [("a", str(spoken.root / "a"))]
    limits = {"names": ["one", "two"], "lora_modules": modules, "max_model_len": 8}
    with web_server(spoken.config(**limits)) as web:
        for model in ("one", "two", "one:a", "two:a", "a"):
            assert web.answer(COMPLETIONS, prompt=PROMPT, model=model)["model"] == model
        error = web.refusal(COMPLETIONS, 404, prompt=PROMPT, model="base")
        assert error["message"] == "The model `base` does not exist. Valid aliases: one, two."
        cards = web.client.get("/v1/models").json()["data"]
        told = [(c["id"], c["root"], c["parent"], c["max_model_len"]) for c in cards]
        base = str(spoken.engine)
        assert told == [
            ("one", base, None, 8),
            ("two", base, None, 8),
            ("a", str(spoken.root / "a"), "one", None),
        ]
        answer = web.answer(COMPLETIONS, prompt=PROMPT, max_tokens=50, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == 8
        assert "9 tokens" in web.refusal(COMPLETIONS, prompt=[5] * 9)["message"]
        assert POSITIONS > 9


def test_one_adapter_may_be_an_object_or_a_list(web: Web) -> None:
    for name in ("a", "b"):
        for body in ({"lora": {"name": name}}, {"lora_path": [name]}, {"lora_path": [name] * 2}):
            assert said(web, **body) == said(web, model=name)
    half = {"name": "a", "scale": 0.5}
    assert said(web, lora=half) == said(web, lora=[half]) != said(web, model="a")
    assert said(web, lora_path=[]) == said(web, lora_path=[None]) == said(web)


def test_a_card_is_as_vllms(spoken: Spoken) -> None:
    module = NamedPath.of(json.dumps({"name": "a", "path": str(spoken.root / "a")}))
    child = module._replace(name="child", parent="a")
    with web_server(spoken.config(lora_modules=[module, child])) as web:
        cards = web.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("base", None),
        ("a", "base"),
        ("child", "a"),
    ]
    for card in cards:
        (permission,) = card["permission"]
        assert card["owned_by"] == "vllm"
        assert permission["id"].startswith("modelperm-")
        assert (permission["object"], permission["organization"]) == ("model_permission", "*")


@pytest.mark.parametrize(
    "text",
    [
        *("a", "{}", '{"name": "a"}', "[]", '{"name": "a", "path": "b"', "{1: 2}"),
        '{"name": "a", "path": "b", "is_3d_lora_weight": true}',
    ],
)
def test_what_is_no_module_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--lora-modules has"):
        NamedPath.of(text)
