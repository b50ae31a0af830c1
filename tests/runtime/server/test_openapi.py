"""The document of the routes: it names those that there are, and what their bodies are."""

import json
import re
from typing import Any

import pytest
from starlette.routing import Route
from support.served_engines import Spoken
from support.web_server import Web

from trt_lora.runtime.server.answer_shapes import SHAPES
from trt_lora.runtime.server.openapi import openapi


def references(value: Any) -> set[str]:
    """The components that a document refers to."""
    return set(re.findall(r"#/components/schemas/(\w+)", json.dumps(value)))


@pytest.mark.parametrize("allows_updates", [True, False])
def test_every_component_that_is_referred_to_is_there(allows_updates: bool) -> None:
    document = json.loads(openapi(allows_updates=allows_updates))
    assert document["openapi"] == "3.1.0"
    assert references(document) == document["components"]["schemas"].keys()
    assert {"CompletionBody", "ChatBody", "Error"} <= references(document)
    assert ("LoadBody" in references(document)) == allows_updates


def test_the_routes_that_are_named_are_those_of_the_server(web: Web) -> None:
    document = web.client.get("/openapi.json").json()
    routes = {r.path: r.methods or set() for r in web.server._routes() if isinstance(r, Route)}
    for path, operations in document["paths"].items():
        assert {method.upper() for method in operations} <= routes[path]
    required = document["components"]["schemas"]["LoadBody"]["required"]
    assert required == ["lora_name", "lora_path"]


def holds(schema: Any, value: Any) -> bool:
    """Whether a value is as a schema says, of the few words that `SHAPES` uses."""
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(value is None if n == "null" else isinstance(value, kinds[n]) for n in names):
        return False
    if isinstance(value, list):
        return all(holds(schema["items"], inner) for inner in value)
    fields = schema.get("properties", {})
    return all(n in value and holds(fields[n], value[n]) for n in schema.get("required", ()))


def test_what_is_answered_has_the_shape_that_is_told(web: Web, spoken: Spoken) -> None:
    adapter = {"lora_name": "c", "lora_path": str(spoken.adapters["a"])}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "w5 w6", "max_tokens": 2, "n": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2},
        "/tokenize": {"prompt": "w5 w6"},
        "/detokenize": {"tokens": [5, 6]},
        "/v1/load_lora_adapter": adapter,
        "/v1/unload_lora_adapter": {"lora_name": "c", "wait": True},
        "/adapters": {"name": "c", "src": adapter["lora_path"]},
    }
    headers = {"Accept": "application/json"}
    posted = {p: web.client.post(p, json=body, headers=headers) for p, body in bodies.items()}
    answers = {path: answer.json() for path, answer in posted.items()}
    answers |= {path: web.client.get(path).json() for path in SHAPES.keys() - bodies.keys()}
    assert {path: holds(SHAPES[path], answer) for path, answer in answers.items()} == dict.fromkeys(
        SHAPES, True
    )
    assert not holds(SHAPES["/v1/models"], answers["/version"])
    assert not holds(SHAPES["/v1/completions"], answers["/v1/chat/completions"])
    web.client.delete("/adapters/c")


def test_a_method_that_a_route_has_not_is_told_which_it_has(web: Web) -> None:
    for path, methods in (("/v1/completions", "POST"), ("/v1/models", "GET, HEAD")):
        answer = web.client.request("TRACE", path)
        assert answer.status_code == 405
        assert sorted(answer.headers["allow"].split(", ")) == methods.split(", ")
