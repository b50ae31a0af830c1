"""What is no body of JSON, or not the one that a route takes."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.tiny_sizes import POSITIONS
from support.web_server import COMPLETIONS, Web, refused

from trt_lora.runtime.server.adapters.adapter_bodies import LoadBody
from trt_lora.runtime.server.answers.bodies import ChatBody, CompletionBody
from trt_lora.runtime.server.errors import HttpError, public
from trt_lora.runtime.server.json_values import decoded

DEEPEST = 64


def refusal(raw: bytes, kind: type[Any] = CompletionBody) -> HttpError:
    with pytest.raises(HttpError) as raised:
        decoded(raw, kind)
    assert raised.value.status == 400
    assert len(str(raised.value)) < 300
    return raised.value


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b'{"prompt"', b'{"prompt": "x"}}', b"[]", b"null", b"7", b'"prompt"'),
        *(b'{"prompt": "x",}', b"{'prompt': 'x'}", b"\x00", b"\xef\xbb\xbf{}", b"{" * 100_000),
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "\xff\xfe"}',  # no UTF-8
        b'{"prompt": "\xed\xa0\x80"}',  # half a character
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "user": "\xc3"}',
        b'{"prompt": "x", "unknown": "\xff"}',
        b'{"prompt": "x", "unknown": ' + b"1" * 100 + b"x}",
    ],
)
def test_what_is_no_object_of_json_is_refused(raw: bytes) -> None:
    error = refusal(raw)
    assert error.kind == "Bad Request"
    assert str(error).startswith("1 validation error:\n  ")


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return b'{"prompt": "x", "unknown": ' + opening * depth + closing * depth + b"}"


def test_a_body_is_as_deep_as_64() -> None:
    assert decoded(nested(DEEPEST - 1), CompletionBody).prompt == "x"
    deep_objects = nested(DEEPEST - 1, b'{"a":', b"}").replace(b":}", b":0}")
    assert decoded(deep_objects, CompletionBody).prompt == "x"
    too_deep = "the body is deeper than 64 lists and objects"
    for depth in (DEEPEST, 900, 100_000):
        assert str(refusal(nested(depth))).endswith(too_deep) or depth > 900
    assert str(refusal(nested(DEEPEST, b'{"a":[', b"]}"))) == too_deep


def test_a_wide_body_is_not_deep_and_brackets_in_text_are_text() -> None:
    assert decoded(b'{"prompt": [' + b"[1]," * 9999 + b"[1]]}", CompletionBody)
    text = "[" * 1000 + '\\"' + "{" * 1000
    assert decoded(f'{{"prompt": "{text}"}}'.encode(), CompletionBody).prompt == (
        "[" * 1000 + '"' + "{" * 1000
    )
    closing = b'{"prompt": "' + b"]" * 100 + b'", "unknown": ' + b"[" * 70 + b"]" * 70 + b"}"
    assert "deeper" in str(refusal(closing))


@pytest.mark.parametrize(
    ("kind", "raw", "param"),
    [
        (CompletionBody, b"{}", "body.prompt"),
        (CompletionBody, b'{"prompt": 5}', "body.prompt"),
        (CompletionBody, b'{"prompt": {}}', "body.prompt"),
        (CompletionBody, b'{"prompt": "x", "n": "2"}', "body.n"),
        (CompletionBody, b'{"prompt": "x", "n": 1.5}', "body.n"),
        (CompletionBody, b'{"prompt": "x", "stop": [1]}', "body.stop"),
        (CompletionBody, b'{"prompt": "x", "stream": "yes"}', "body.stream"),
        (CompletionBody, b'{"prompt": "x", "logit_bias": [1]}', "body.logit_bias"),
        (CompletionBody, b'{"prompt": "x", "lora": [{"name": 1}]}', "body.lora"),
        (CompletionBody, b'{"prompt": "x", "lora": [{"scale": 1}]}', "body.lora"),
        (CompletionBody, b'{"prompt": "x", "lora": [{"name": "a", "y": 1}]}', "body.lora"),
        (ChatBody, b"{}", "body.messages"),
        (ChatBody, b'{"messages": "hello"}', "body.messages"),
        (ChatBody, b'{"messages": ["hello"]}', "body.messages"),
        (ChatBody, b'{"messages": [], "logprobs": 3}', "body.logprobs"),
        (LoadBody, b'{"lora_path": "/x"}', "body.lora_name"),
        (LoadBody, b'{"lora_name": "x"}', "body.lora_path"),
        (LoadBody, b'{"lora_name": null, "lora_path": "/x"}', "body.lora_name"),
    ],
)
def test_a_field_that_is_missing_or_of_another_type_is_named(
    kind: type[Any], raw: bytes, param: str
) -> None:
    assert refusal(raw, kind).param == param


def test_unknown_fields_are_ignored() -> None:
    assert decoded(b'{"prompt": "x", "new_in_vllm": {"a": [1]}}', CompletionBody).prompt == "x"


def test_a_body_says_that_it_is_json(web: Web) -> None:
    def asked(kind: str | None) -> httpx.Response:
        headers = {} if kind is None else {"content-type": kind}
        body = b'{"prompt": "w5", "max_tokens": 1}'
        return web.client.post(COMPLETIONS, content=body, headers=headers)

    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert asked(kind).status_code == 200
    others = ("text/plain", "application/x-www-form-urlencoded", "application/jsonl", "", None)
    for other in others:
        error = refused(asked(other), 400)
        assert error["message"] == "Unsupported Media Type: Only 'application/json' is allowed"


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "name",
    [
        *("seed", "n", "top_k", "min_tokens", "logprobs", "prompt_logprobs"),
        *("stop_token_ids", "allowed_token_ids", "logit_bias", "prompt"),
    ],
)
def test_a_number_of_71_bits_is_refused_by_name(web: Web, name: str, sign: int) -> None:
    """Those to the engine have 64."""
    huge = sign << 70
    lists = ("stop_token_ids", "allowed_token_ids", "prompt")
    value = {str(huge): 1} if name == "logit_bias" else [huge] if name in lists else huge
    body: dict[str, Any] = {"prompt": [5], name: value}
    error = web.refusal(COMPLETIONS, **body)
    assert error["param"] in (name, f"body.{name}")


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"prompt": [5], "seed": ' + b"9" * 5000 + b"}", "body.seed"),
        (b'{"prompt": [5], "logit_bias": {"' + b"9" * 5000 + b'": 1}}', "logit_bias"),
        (b'{"prompt": [5], "temperature": 1e400}', "body.temperature"),
        (b'{"prompt": [5], "lora": [{"name": "a", "scale": 1e400}]}', "body.lora"),
    ],
    ids=["seed", "logit_bias", "temperature", "scale"],
)
def test_a_number_that_is_too_long_is_refused_by_name(web: Web, raw: bytes, param: str) -> None:
    headers = {"content-type": "application/json"}
    error = refused(web.client.post(COMPLETIONS, content=raw, headers=headers), 400)
    assert error["param"] == param
    assert len(error["message"]) < 300


def test_an_answer_that_may_be_longer_than_there_is_room_ends_with_the_room(web: Web) -> None:
    body = {"prompt": [5], "ignore_eos": True, "temperature": 0, "max_tokens": 1 << 70}
    assert web.answer(COMPLETIONS, **body)["usage"]["total_tokens"] == POSITIONS


def test_no_message_tells_a_path_or_is_long() -> None:
    for text in ("/home/me/a.json", "'/home/me/a.json'", f"{Path.home()}/x/y: no such file"):
        assert "me" not in public(text).replace("...: no such file", "")
        assert str(Path.home()) + "/" not in public(text)
    assert public("text of /v1/models; it is json/or/none") == "text of ...; it is json/or/none"
    for folder in ("My Models", "models (old)", "\u00e9 \u2603", "x=1 #2 $HOME"):
        for file in ("adapter_config.json", "b", ""):
            text = f"no adapter in /home/me/{folder}/{file}: it is missing"
            assert public(text) == "no adapter in ...: it is missing"
    assert public("/a/b is no folder, and /c d/e is") == "... is no folder, and ... is"
    assert public(f"1/2 {'/a b' * 99_999}").startswith("1/2 ...")
    assert len(public("x" * 100_000)) <= 2000


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty"])
def test_what_is_no_number_is_refused_by_the_name_of_its_field(
    web: Web, name: str, number: str
) -> None:
    content = f'{{"prompt": "w5", "{name}": {number}}}'.encode()
    headers = {"content-type": "application/json"}
    error = refused(web.client.post(COMPLETIONS, content=content, headers=headers), 400)
    assert error["param"] == f"body.{name}"


def test_a_number_that_json_lacks_makes_no_json_of_what_is_none() -> None:
    for raw in (b'{"prompt": NaN', b'{"prompt": "x", "seed": NaN}', b"NaN"):
        assert refusal(raw, CompletionBody).status == 400
    assert decoded(b'{"prompt": "NaN"}', CompletionBody).prompt == "NaN"
