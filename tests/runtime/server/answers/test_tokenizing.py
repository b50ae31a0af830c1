"""Texts and conversations as tokens, and tokens as text."""

from typing import Any

import pytest
from support.models.tiny_sizes import POSITIONS, VOCABULARY
from support.web_server import Web

TALK = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]


def test_a_text_and_a_conversation_become_tokens_and_text_again(web: Web) -> None:
    found = web.answer("/tokenize", prompt="w5 w6 w7", model="a")
    assert found == {
        "count": 3,
        "max_model_len": POSITIONS,
        "tokens": [5, 6, 7],
        "token_strs": None,
    }
    named = web.answer("/tokenize", messages=TALK, return_token_strs=True)
    assert (named["tokens"], named["token_strs"]) == ([5, 6, 7], ["w5", "w6", "w7"])
    assert web.answer("/detokenize", tokens=[5, 6, 7], model="base") == {"prompt": "w5 w6 w7"}


def test_more_tokens_than_an_answer_has_room_for_are_counted(web: Web) -> None:
    assert web.answer("/tokenize", prompt="w5 " * (POSITIONS + 9))["count"] == POSITIONS + 9


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "body.prompt"),
        ("/tokenize", {"messages": [5]}, 400, "body.messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, None),
        ("/tokenize", {"prompt": "w5", "model": "x"}, 404, "model"),
        ("/detokenize", {}, 400, "body.tokens"),
        ("/detokenize", {"tokens": "w5"}, 400, "body.tokens"),
        ("/detokenize", {"tokens": [VOCABULARY]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1 << 70]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "x"}, 404, "model"),
    ],
)
def test_what_is_no_text_and_no_token_is_refused(
    web: Web, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    assert web.refusal(path, status, **body)["param"] == param
