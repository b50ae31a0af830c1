"""One answer for what every replica was asked."""

import json
from typing import Any

import pytest
from starlette.responses import Response

from trt_lora.runtime.scaleout.everywhere import Whole, is_for_all, loaded_name, together
from trt_lora.runtime.server.errors import HttpError

LOAD, UNLOAD, KNOWN = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/lora_adapters"


def whole(replica: str, body: Any = "done", status: int = 200) -> Whole:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Whole(replica, status, [(b"content-type", b"text/x")], text, None)


def refused(replica: str, status: int = 500) -> Whole:
    return whole(replica, HttpError(status, "no room", "lora_path").body(), status)


def error(response: Response) -> Any:
    return json.loads(bytes(response.body))["error"]


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", LOAD, True),
        ("POST", UNLOAD, True),
        ("POST", "/adapters", True),
        ("DELETE", "/adapters/a", True),
        ("POST", f"{KNOWN}/a/pin", True),
        ("GET", KNOWN, True),
        ("GET", "/metrics", True),
        ("GET", f"{KNOWN}/a", False),
        ("GET", "/v1/models", False),
        ("POST", "/v1/completions", False),
        ("POST", "/tokenize", False),
    ],
)
def test_changes_and_lists_of_adapters_are_for_all(method: str, path: str, expected: bool) -> None:
    assert is_for_all(method, path) is expected


def test_a_load_has_a_name() -> None:
    assert loaded_name(LOAD, b'{"lora_name": "a", "lora_path": "b"}') == "a"
    assert loaded_name("/adapters", b'{"name": "a", "src": "b"}') == "a"
    assert loaded_name(UNLOAD, b'{"lora_name": "a"}') is None
    for body in (b"", b"[]", b"{", b'{"lora_name": 1}', b"\xff"):
        assert loaded_name(LOAD, body) is None


def test_a_load_that_all_take_is_answered_by_one() -> None:
    response = together([whole("x"), whole("y")], LOAD)
    assert (response.status_code, response.body) == (200, b'"done"')
    assert response.headers["content-type"] == "text/x"


def test_a_load_that_one_refuses_says_which_and_that_it_is_undone() -> None:
    response = together([whole("x"), refused("y", 409)], LOAD)
    assert response.status_code == 409
    told = error(response)
    assert told["message"] == "no room (of 2 replicas y refused; undone on the others)"
    assert (told["param"], told["type"], told["code"]) == ("lora_path", "ConflictError", 409)
    assert error(together([refused("x"), refused("y")], LOAD))["message"] == "no room"


def test_an_unload_is_done_where_the_adapter_was() -> None:
    assert together([refused("x", 404), whole("y")], UNLOAD).status_code == 200
    assert together([refused("x", 404), refused("y", 404)], UNLOAD).status_code == 404


def test_adapters_are_listed_with_their_replicas() -> None:
    lists = [{"data": [{"name": "a", "sha256": sha}], "refused": []} for sha in "12"]
    lists[1]["refused"] = [{"name": "b", "why": "c"}]
    response = together([whole("x", lists[0]), whole("y", lists[1])], KNOWN)
    found = json.loads(bytes(response.body))
    data = [(each["name"], each["sha256"], each["replica"]) for each in found["data"]]
    assert data == [("a", "1", "x"), ("a", "2", "y")]
    assert found["refused"] == [{"name": "b", "why": "c", "replica": "y"}]


def test_series_of_replicas_keep_apart_and_families_together() -> None:
    text = b'# HELP m Of\n# TYPE m gauge\nm{a="b,c}"} 1.0\nm 2\n# HELP n Or\n# TYPE n gauge\nn 3\n'
    response = together([whole("x", text), whole("y", text)], "/metrics")
    assert bytes(response.body).decode().splitlines() == [
        "# HELP m Of",
        "# TYPE m gauge",
        'm{a="b,c}",replica="x"} 1.0',
        'm{replica="x"} 2',
        'm{a="b,c}",replica="y"} 1.0',
        'm{replica="y"} 2',
        "# HELP n Or",
        "# TYPE n gauge",
        'n{replica="x"} 3',
        'n{replica="y"} 3',
    ]
