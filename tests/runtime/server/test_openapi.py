"""The document of the routes: it names those that there are, and what their bodies are."""

import json
import re
from typing import Any

import pytest
from starlette.routing import Route
from support.web_server import Web

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
