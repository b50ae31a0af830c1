"""What errors repeat of a request: no more than 200 characters, whatever it was."""

from typing import Any

import pytest
from support.web_server import CHATS, COMPLETIONS, Web

from trt_lora.plugins.errors import AdapterError, ChangedAdapterError
from trt_lora.runtime.server.answers.running_answer import http_error
from trt_lora.runtime.server.errors import GONE, HttpError, public

LONG = "Q" * 1500
SPACED = "Q q" * 500
ENDLESS = "Q q" * 5000


@pytest.mark.parametrize("value", [LONG, SPACED, ENDLESS], ids=["one word", "many", "more"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, lambda value: {"prompt": "w5", "response_format": {"type": value}}),
        (COMPLETIONS, lambda value: {"prompt": "w5", "structured_outputs": {value: 1}}),
        (COMPLETIONS, lambda value: {"prompt": "w5", "structured_outputs": {"regex": f"{value}("}}),
        (
            COMPLETIONS,
            lambda value: {"prompt": "w5", "structured_outputs": {"grammar": f"start: {value}"}},
        ),
        (
            COMPLETIONS,
            lambda value: {"prompt": "w5", "structured_outputs": {"json": {"type": value}}},
        ),
        (COMPLETIONS, lambda value: {"prompt": "w5", "truncation_side": value}),
        (COMPLETIONS, lambda value: {"prompt": "w5", "lora": [{"name": "a", value: 1}]}),
        (COMPLETIONS, lambda value: {"prompt": "w5", "lora": [{"name": value}]}),
        (COMPLETIONS, lambda value: {"prompt": "w5", "model": value}),
        (CHATS, lambda value: {"messages": [], "reasoning_effort": value}),
        (CHATS, lambda value: {"messages": [{"role": "user", "content": [{"type": value}]}]}),
        ("/tokenize", lambda value: {"messages": [], "tools": [{"type": value, "function": {}}]}),
        ("/v1/load_lora_adapter", lambda value: {"lora_name": "x", "lora_path": value}),
        ("/v1/load_lora_adapter", lambda value: {"lora_name": value, "lora_path": "x"}),
        ("/v1/unload_lora_adapter", lambda value: {"lora_name": value}),
    ],
)
def test_an_error_repeats_little_of_what_was_asked(
    web: Web, path: str, body: Any, value: str
) -> None:
    response = web.post(path, **body(value))
    assert 400 <= response.status_code < 500
    assert response.text.count("Q") <= 200


def test_an_error_repeats_little_of_a_number(web: Web) -> None:
    number = "7" * 1500
    for body in (f'{{"prompt": "x", "n": {number}}}', f'{{"prompt": [{number}]}}'):
        headers = {"content-type": "application/json"}
        response = web.client.post(COMPLETIONS, content=body, headers=headers)
        assert response.status_code == 400
        assert response.text.count("7") <= 200


def test_short_words_stay_as_they_are() -> None:
    text = "top_p is 2, expected `a` or 'b c'; see --help"
    assert public(text) == text
    text = f"the model's prompt is 1, and that is what it's for: {'word ' * 100}."
    assert public(text) == text
    assert public(f"it is {'x' * 300!r}, expected 1") == f"it is '{'x' * 195}...', expected 1"


def test_files_that_have_changed_are_a_conflict_whatever_names_them() -> None:
    for field in ("lora", "model", None):
        assert http_error(ChangedAdapterError("x"), field).status == 409
    assert http_error(AdapterError("x"), "lora").status == 400


def test_a_client_that_is_gone_has_a_kind_of_its_own() -> None:
    assert HttpError(GONE, "gone").kind == "ClientClosedRequest"
