"""Structured output: whatever the logits are, a finished answer is what was asked for."""

import builtins
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes.random_logits import (
    BYTES,
    STOP,
    RandomLogits,
    byte_tokenizer,
    params_of,
    tokens_of,
)
from support.schedulers import scheduler_of
from support.steps import step_of

from trt_lora.plugins.errors import BackendError, ConfigError, OutputError
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Token


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def answer_of(
    tokenizer: TextTokenizer, wanted: StructuredOutputsParams, seed: int, **fields: Any
) -> tuple[str, list[Token]]:
    """The text of an answer, which has ended by itself, and its tokens."""
    params = params_of(structured_outputs=wanted, **{"temperature": 1.0, **fields})
    tokens = tokens_of(tokenizer, params, seed)
    assert tokens[-1].finish_reason == "stop"
    return "".join(token.text for token in tokens), tokens


Check = Callable[[Any], bool]


def schemas() -> st.SearchStrategy[tuple[dict[str, Any], Check]]:
    """JSON schemas, and whether a value is one of theirs, said in Python."""
    leaves = st.sampled_from(
        [
            ({"type": "boolean"}, lambda v: isinstance(v, bool)),
            ({"type": "null"}, lambda v: v is None),
            ({"type": "integer", "maximum": 50}, lambda v: type(v) is int and v <= 50),
            ({"type": "string", "maxLength": 6}, lambda v: isinstance(v, str) and len(v) <= 6),
            ({"enum": ["a", 3, "ü"]}, lambda v: v in ("a", 3, "ü")),
        ]
    )
    return st.recursive(leaves, lambda inner: arrays(inner) | objects(inner), max_leaves=4)


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return inner.map(
        lambda item: (
            {"type": "array", "items": item[0], "maxItems": 3},
            lambda v: isinstance(v, list) and len(v) <= 3 and all(map(item[1], v)),
        )
    )


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(st.sampled_from(["x", "name", "é"]), inner, min_size=1, max_size=2)
    return fields.map(
        lambda items: (
            {
                "type": "object",
                "properties": {name: schema for name, (schema, _) in items.items()},
                "required": [*items],
                "additionalProperties": False,
            },
            lambda v: v.keys() == items.keys() and all(items[k][1](v[k]) for k in v),
        )
    )


@settings(max_examples=40, deadline=None)
@given(schemas(), st.integers(0, 9999), st.booleans())
def test_an_answer_is_what_its_schema_says(
    tokenizer: TextTokenizer, schema: tuple[dict[str, Any], Check], seed: int, as_text: bool
) -> None:
    fields, is_one = schema
    wanted = StructuredOutputsParams(json=json.dumps(fields) if as_text else fields)
    text, _ = answer_of(tokenizer, wanted, seed)
    assert is_one(json.loads(text)), text


@pytest.mark.parametrize("regex", ["[a-f]{2,9}", "(yes|no)", "[0-9]+(\\.[0-9]{2})?", "é*x"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_whole_answer_matches_its_regex(
    tokenizer: TextTokenizer, regex: str, temperature: float
) -> None:
    for seed in range(5):
        wanted = StructuredOutputsParams(regex=regex)
        text, _ = answer_of(tokenizer, wanted, seed, temperature=temperature)
        assert re.fullmatch(regex, text)


def test_an_answer_is_of_its_grammar_whatever_bias_and_penalties_say(
    tokenizer: TextTokenizer,
) -> None:
    wanted = StructuredOutputsParams(grammar='start: pair+\npair: "<" pair* ">"')
    bias = {BYTES.index("q"): 100.0, BYTES.index(">"): 6.0}
    for seed in range(5):
        text, _ = answer_of(tokenizer, wanted, seed, logit_bias=bias, frequency_penalty=-0.5)
        assert set(text) == {"<", ">"}
        while "<>" in text:
            text = text.replace("<>", "")
        assert text == ""


def test_an_answer_ends_where_nothing_can_follow(tokenizer: TextTokenizer) -> None:
    text, tokens = answer_of(tokenizer, StructuredOutputsParams(regex="ab"), 0)
    assert text == "ab"
    assert [token.finish_reason for token in tokens] == [None, "stop"]
    assert tokens[-1].token_id == BYTES.index("b")


def test_one_that_cannot_go_on_ends_alone_and_is_named(
    tokenizer: TextTokenizer,
) -> None:
    batch = scheduler_of(RandomLogits(0), tokenizer=tokenizer, rows=2)
    other = batch.submit([3], params_of(max_tokens=20, logit_bias={STOP: -100}))
    wanted = StructuredOutputsParams(regex="[ab]{9}")
    row = batch.submit([3], params_of(max_tokens=20, structured_outputs=wanted))
    step_of(batch)
    constraint = batch._active[row].constraint
    assert constraint is not None
    constraint.accept([BYTES.index("z")])  # what no mask would allow
    answers = batch.step()
    assert isinstance(answers.failed[row], OutputError)
    assert f"structured output of prompt {row} cannot go on" in str(answers.failed[row])
    assert answers.tokens.keys() == {other}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (StructuredOutputsParams(regex="("), r"a regex that llguidance refuses: .*unclosed"),
        (StructuredOutputsParams(grammar='start: "a" b'), 'a grammar that .*unknown name: "b"'),
        (StructuredOutputsParams(json={"type": "foo"}), "a json that .*Invalid type: foo"),
        (StructuredOutputsParams(json={"not": {}}), r'a json that .*Unimplemented keys: \["not"\]'),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(
    tokenizer: TextTokenizer, wanted: StructuredOutputsParams, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)structured_outputs has {message}"):
        answer_of(tokenizer, wanted, 0)


@pytest.mark.parametrize(
    "value", [{"a": {1, 2}}, {"a": float("nan")}, "{", '{"a": NaN}', "[" * 5000, '{}], "x": [{}']
)
def test_a_schema_that_is_no_json_is_refused(value: str | dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"structured_outputs has json .*, which is no JSON"):
        StructuredOutputsParams(json=value)


def test_a_stop_string_ends_what_has_to_be_json(tokenizer: TextTokenizer) -> None:
    wanted = StructuredOutputsParams(regex='"ab+c*"')
    params = params_of(structured_outputs=wanted, stop=["bc"], logit_bias={BYTES.index("c"): 50.0})
    tokens = tokens_of(tokenizer, params)
    assert "".join(token.text for token in tokens) == '"a'
    assert (tokens[-1].finish_reason, tokens[-1].stop_reason) == ("stop", "bc")


@pytest.mark.parametrize(("ignores", "own"), [(False, []), (True, [STOP]), (False, [STOP])])
def test_an_answer_ends_with_a_stop_token_where_its_grammar_does_and_nowhere_else(
    tokenizer: TextTokenizer, ignores: bool, own: list[int]
) -> None:
    """The model's own is 2; all of them are far likelier than any text."""
    wanted = StructuredOutputsParams(regex="(ab)+")
    params = params_of(
        structured_outputs=wanted,
        ignore_eos=ignores,
        stop_token_ids=own,
        min_tokens=3,
        logit_bias={2: 199.0, STOP: 98.0},
    )
    tokens = tokens_of(tokenizer, params)
    assert "".join(token.text for token in tokens) == "abab"  # the least of more than 3
    assert (tokens[-1].token_id, tokens[-1].finish_reason) == (None, "stop")
    assert tokens[-1].stop_reason == (STOP if ignores else None)


def test_n_answers_follow_their_grammar_each(tokenizer: TextTokenizer) -> None:
    batch = scheduler_of(RandomLogits(0), tokenizer=tokenizer, rows=4)
    wanted = StructuredOutputsParams(regex="[a-f]{9}")
    numbers = batch.submit_all([3], params_of(structured_outputs=wanted, n=4, temperature=9.0))
    texts = dict.fromkeys(numbers, "")
    while batch:
        for token in step_of(batch):
            texts[token.sequence_id] += token.text
    assert len(set(texts.values())) == 4
    assert all(re.fullmatch("[a-f]{9}", text) for text in texts.values())


def test_an_answer_without_an_end_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match="needs a token that ends an answer, and there is none"):
        answer_of(tokenizer, StructuredOutputsParams(regex="a"), 0, stop_token_ids=())


def test_without_llguidance_the_extra_is_named(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "llguidance":
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(tokenizer, "_grammars", None)
    with pytest.raises(BackendError, match=r"structured output needs .*trt-lora\[structured\]"):
        answer_of(tokenizer, StructuredOutputsParams(regex="a"), 0)
