"""Sampling parameters alone, as JSON: read as those of a completion, refused by name."""

from typing import Any

import pytest

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.server.answers.sampling_json import read_object, sampling_from
from trt_lora.runtime.server.errors import HttpError

DEFAULT = SamplingParams(top_p=0.5, temperature=0.25)


def test_fields_are_vllms_and_numbers_may_be_strings() -> None:
    given = {"temperature": "0.5", "top_k": "3", "logit_bias": {"5": 1}, "stop": ["a"], "n": 1}
    expected = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, logit_bias={5: 1.0}, stop=["a"], max_tokens=16
    )
    assert sampling_from(given, DEFAULT, 20) == expected


def test_structured_output_is_asked_for_as_of_the_server() -> None:
    found = sampling_from({"structured_outputs": {"choice": ["a", "b"]}}, DEFAULT, 20)
    assert found.structured_outputs is not None
    assert found.structured_outputs.kind == "grammar"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tempratur": 1}, "'tempratur' is no sampling parameter, .*did you mean 'temperature'"),
        ({"prompt": "x"}, "'prompt' is no sampling parameter"),
        ({"prompt_logprobs": 1}, "'prompt_logprobs' is no sampling parameter"),
        ({"n": 2, "temperature": 1}, "n is 2, expected 1"),
        ({"logprobs": 21}, "logprobs is 21, expected 0 to 20"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"suffix": "x"}, "suffix is not supported"),
    ],
)
def test_a_field_is_refused_by_its_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, HttpError), match=message):
        sampling_from(given, DEFAULT, 20)


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="what is it is"):
        read_object(text, "what is it")
