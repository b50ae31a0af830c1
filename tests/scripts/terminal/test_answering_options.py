"""Options of an answer: what is typed becomes what `SamplingParams` and templates take."""

import argparse
import re
from pathlib import Path

import pytest

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import SamplingParams
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams
from trt_lora.scripts.terminal.answering_options import (
    add_sampling_options,
    add_several_answers_options,
    sampling_params,
    template_variables,
)

SCHEMA, GRAMMAR = '{"type": "integer"}', 'start: "a"+'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "schema.json").write_text(SCHEMA)
    (tmp_path / "grammar.lark").write_text(GRAMMAR)
    return tmp_path


def parsed(folder: Path, *options: str) -> SamplingParams:
    parser = argparse.ArgumentParser()
    add_sampling_options(parser.add_argument)
    add_several_answers_options(parser.add_argument)
    return sampling_params(parser.parse_args(options), folder)


def test_structured_output_is_read_from_files_or_given(folder: Path) -> None:
    ways = {
        ("--json-schema", str(folder / "schema.json")): StructuredOutputsParams(json=SCHEMA),
        ("--regex", "a+"): StructuredOutputsParams(regex="a+"),
        ("--grammar", str(folder / "grammar.lark")): StructuredOutputsParams(grammar=GRAMMAR),
    }
    for options, expected in ways.items():
        assert parsed(folder, *options).structured_outputs == expected
    assert parsed(folder).structured_outputs is None


def test_several_ways_at_a_time_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="structured_outputs has json and regex, expected one of"):
        parsed(folder, "--regex", "a", "--json-schema", str(folder / "schema.json"))


def test_options_may_be_repeated_where_there_are_several_values(folder: Path) -> None:
    options = ("--stop", "a", "--stop", "b c", "--logit-bias", "3=1", "--logit-bias", "5=-0.5")
    found = parsed(folder, *options)
    assert found.stop_strings == ("a", "b c")
    assert found.logit_bias == {3: 1.0, 5: -0.5}


def test_what_ends_an_answer_and_what_it_never_says_are_options(folder: Path) -> None:
    options = ["--min-tokens", "2", "--stop-token-ids", "5", "--stop-token-ids", "7"]
    flags = ["--ignore-eos", "--include-stop-str-in-output", "--no-skip-special-tokens"]
    words = ["--bad-words", "a b", "--bad-words", "c"]
    assert parsed(folder, *options, *flags, *words) == SamplingParams(
        temperature=0,
        max_tokens=64,
        min_tokens=2,
        stop_token_ids=[5, 7],
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        bad_words=["a b", "c"],
    )


@pytest.mark.parametrize(
    ("text", "message"), [("{", "expected JSON: Expect"), ("[1]", "expected an object: {...}")]
)
def test_variables_of_a_template_are_a_json_object(text: str, message: str) -> None:
    given = argparse.Namespace(chat_template_kwargs='{"a": [1, null]}')
    assert template_variables(given) == {"a": [1, None]}
    assert template_variables(argparse.Namespace(chat_template_kwargs=None)) == {}
    with pytest.raises(ConfigError, match=re.escape(message)):
        template_variables(argparse.Namespace(chat_template_kwargs=text))


def test_without_options_the_defaults_are_those_of_python(folder: Path) -> None:
    assert parsed(folder) == SamplingParams(max_tokens=64, temperature=0)


def test_one_token_has_one_bias(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--logit-bias names token 5 twice"):
        parsed(folder, "--logit-bias", "5=1", "--logit-bias", "5=2")
