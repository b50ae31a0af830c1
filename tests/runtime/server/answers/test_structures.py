"""What an answer has to be, as a body asks for it: understood, or refused."""

from typing import Any

import pytest
from support.answer_bodies import KINDS, refusal, sampling

from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.server.answers.bodies import AnswerBody, CompletionBody

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def structure(kind: type[AnswerBody] = CompletionBody, /, **fields: Any) -> Any:
    return sampling(kind, **fields).structured_outputs


@pytest.mark.parametrize("kind", KINDS)
def test_json_is_asked_for_in_openais_way_and_in_vllms(kind: type[AnswerBody]) -> None:
    wanted = StructuredOutputsParams(json=SCHEMA)
    named = {"name": "x", "schema": SCHEMA, "strict": True}
    openais = {"type": "json_schema", "json_schema": named}
    assert structure(kind, response_format=openais) == wanted
    assert structure(kind, structured_outputs={"json": SCHEMA}) == wanted
    assert structure(kind, structured_outputs={"json": SCHEMA, "regex": None}) == wanted
    any_object = StructuredOutputsParams(json={"type": "object"})
    assert structure(kind, structured_outputs={"json_object": True}) == any_object
    plain = {"disable_any_whitespace": False, "whitespace_pattern": None, "regex": "a"}
    assert structure(kind, structured_outputs=plain) == StructuredOutputsParams(regex="a")
    assert structure(kind, response_format={"type": "json_object"}) == any_object
    assert structure(kind, response_format={"type": "text"}) is None
    assert structure(kind, structured_outputs={}) is None


def test_a_regex_and_a_grammar_are_as_they_are() -> None:
    regex, grammar = "a+", 'start: "x"'
    assert structure(structured_outputs={"regex": regex}) == StructuredOutputsParams(regex=regex)
    found = structure(structured_outputs={"grammar": grammar})
    assert found == StructuredOutputsParams(grammar=grammar)


CHOICES = ["yes", "no", 'a "quoted" one', "back\\slash", "two\nlines", "é ☃", "/x/", "a|b", ""]


def test_a_choice_is_a_grammar_of_these_texts_and_no_other() -> None:
    llguidance = pytest.importorskip("llguidance")
    from llguidance import LLMatcher, LLTokenizer

    grammar = structure(structured_outputs={"choice": CHOICES}).grammar
    tokenizer = LLTokenizer("byte")
    compiled = llguidance.grammar_from("lark", grammar)

    def accepts(text: str) -> bool:
        matcher = LLMatcher(tokenizer, compiled)
        assert not matcher.get_error()
        tokens = tokenizer.tokenize_str(text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    assert [text for text in CHOICES if not accepts(text)] == []
    assert not any(map(accepts, ["yesno", "y", "maybe", "twolines", "start", "a"]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "body.response_format"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
        *(
            ({"structured_outputs": {"choice": choice}}, "structured_outputs")
            for choice in ([], "yes", [1], 5, {"yes": 1})
        ),
        (
            {
                "structured_outputs": {"regex": "x"},
                "response_format": {"type": "json_object"},
            },
            "structured_outputs",
        ),
    ],
)
def test_other_structures_are_refused(fields: dict[str, Any], param: str) -> None:
    for kind in KINDS:
        assert refusal(kind, **fields).param == param
