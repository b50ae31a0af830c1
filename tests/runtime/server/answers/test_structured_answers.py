"""Answers that have to be something, over HTTP: JSON, a choice, a regex, a grammar."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_sizes import VOCABULARY
from support.served_engines import Spoken
from support.web_server import CHATS, COMPLETIONS, Web, web_server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
OPENAIS = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
CHOICES = ["yes", "no", "it is"]
ASKED: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 60}


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    is_ok = value.keys() == {"ok", "n"} and type(value["ok"]) is bool
    return is_ok and type(value["n"]) is int and 0 <= value["n"] <= 9


WANTED: dict[str, tuple[dict[str, Any], Any]] = {
    "OpenAI's JSON": ({"response_format": OPENAIS}, is_of_schema),
    "vLLM's JSON": ({"structured_outputs": {"json": SCHEMA}}, is_of_schema),
    "any object": (
        {"response_format": {"type": "json_object"}},
        lambda text: text.startswith("{"),
    ),
    "choice": ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    "regex": ({"structured_outputs": {"regex": "[a-f]{3,5}"}}, re.compile("[a-f]{3,5}").fullmatch),
    "grammar": (
        {"structured_outputs": {"grammar": 'start: "<" /[0-9]/ ">"'}},
        re.compile("<[0-9]>").fullmatch,
    ),
}


@pytest.fixture(scope="module")
def lettered(spoken: Spoken, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """A server whose tokens are characters: all of ASCII that is printed."""
    engine: Path = tmp_path_factory.mktemp("lettered") / "engine"
    shutil.copytree(spoken.engine, engine)
    letters = ["<pad>", "<s>", "<end>", *map(chr, range(0x21, 0x7F)), "Ġ"][:VOCABULARY]
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(letters[:3])
    made.save(str(engine / "tokenizer.json"))
    config = Spoken(engine, {}).config(lora_roots=[spoken.root])
    with web_server(config) as running:
        yield running


@pytest.mark.parametrize("name", WANTED)
def test_an_answer_is_what_it_has_to_be(lettered: Web, name: str) -> None:
    fields, is_one = WANTED[name]
    body = {**ASKED, **fields}
    for path, prompt in (
        (COMPLETIONS, {"prompt": "ab"}),
        (CHATS, {"messages": [{"role": "user", "content": "ab"}]}),
    ):
        (choice,) = lettered.answer(path, **prompt, **body)["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert is_one(text), text
        events = [event["choices"][0] for event in lettered.events(path, **prompt, **body)]
        said = [e["text"] if path == COMPLETIONS else e["delta"]["content"] for e in events]
        assert "".join(said) == text


def test_each_of_several_answers_is_what_it_has_to_be(lettered: Web) -> None:
    body = {"prompt": ["ab", "c"], "n": 4, "response_format": OPENAIS, **ASKED}
    texts = [choice["text"] for choice in lettered.answer(COMPLETIONS, **body)["choices"]]
    assert len(texts) == 8
    assert all(map(is_of_schema, texts))
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"properties": {"foo": "bar"}, "type": "object"}},
        {"json": {"type": "nothing"}},
        {"regex": "[.*"},
        {"grammar": ""},
        {"grammar": "root ::= x"},
    ],
    ids=str,
)
def test_a_structure_that_is_none_is_refused_and_the_server_goes_on(
    lettered: Web, wanted: dict[str, Any]
) -> None:
    error = lettered.refusal(COMPLETIONS, prompt="ab", structured_outputs=wanted, **ASKED)
    assert error["param"] == "structured_outputs"
    assert error["message"].startswith("structured_outputs ")
    assert lettered.answer(COMPLETIONS, prompt="ab", **ASKED)
