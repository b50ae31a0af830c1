"""Texts and conversations as tokens, and tokens as text."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_sizes import POSITIONS, VOCABULARY
from support.served_engines import Spoken
from support.web_server import Web, web_server

from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.server.answers.answering import AnswerOptions

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
        ("/tokenize", {"messages": TALK, "chat_template": "x"}, 400, "chat_template"),
        ("/tokenize", {"messages": TALK, "tools": [{"type": "x"}]}, 400, "body.tools"),
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


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "x": 1}}
TEMPLATE = "{% for tool in tools %}{{ tool | tojson }} {% endfor %}{{ messages[0].content }}"
CONFIG = {
    "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
    "additional_special_tokens": [{"content": "<a>"}, "<b>"],
    "added_tokens_decoder": {"1": {"content": "<s>", "special": True}},
    "model_max_length": 10**30,
    "tokenizer_class": "WordTokenizer",
    "name_or_path": "/home/me/model",
    "vocab_file": "/home/me/vocab.json",
}


def test_a_tokenizer_is_told_with_its_template_and_without_its_places(
    spoken: Spoken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM's route answers, of a tokenizer with all kinds of special tokens."""
    engine = tmp_path / "engine"
    shutil.copytree(spoken.engine, engine)
    (engine / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (engine / "chat_template.jinja").write_text(TEMPLATE)
    told = AnswerOptions(shows_tokenizer=True)
    with web_server(Spoken(engine, {}).config(lora_roots=[tmp_path], answers=told)) as web:
        assert web.client.get("/tokenizer_info").json() == {
            "bos_token": "<s>",
            "additional_special_tokens": ["<a>", "<b>"],
            "added_tokens_decoder": {"1": "<s>"},
            "model_max_length": 10**30,
            "tokenizer_class": "WordTokenizer",
            "chat_template": TEMPLATE,
        }
        paths = web.client.get("/openapi.json").json()["paths"]
        assert "get" in paths["/tokenizer_info"]
        written: list[str] = []
        encode = TextTokenizer.encode_text

        def noted(tokenizer: TextTokenizer, text: str, **options: bool) -> list[int]:
            written.append(text)
            return encode(tokenizer, text, **options)

        monkeypatch.setattr(TextTokenizer, "encode_text", noted)
        talk = [{"role": "user", "content": "w5"}]
        web.answer("/tokenize", messages=talk, tools=[TOOL])
        assert web.answer("/tokenize", messages=talk, tools=[])["tokens"] == [5]
        function = {"name": "f", "description": None, "parameters": {"type": "object"}}
        tool = json.dumps({"type": "function", "function": function})
        assert written == [f"{tool} w5", "w5"]


def test_a_tokenizer_is_told_where_a_flag_says_so_alone(web: Web) -> None:
    assert web.client.get("/tokenizer_info").status_code == 404
    assert "/tokenizer_info" not in web.client.get("/openapi.json").json()["paths"]
