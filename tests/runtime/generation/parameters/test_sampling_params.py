"""Sampling parameters: names and defaults of vLLM, and what is refused."""

from typing import Any

import numpy as np
import pytest
from support.api_table.vllm_sampling import THEIRS

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.parameters.sampling_params import REFUSED, SamplingParams
from trt_lora.runtime.generation.text.structured import StructuredOutputsParams


def test_names_order_and_defaults_are_those_of_vllm() -> None:
    assert list(vars(SamplingParams()).items()) == list(THEIRS.items())


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_for_which_nothing_does_the_work_is_refused_by_name(name: str) -> None:
    given: Any = {name: not THEIRS[name] if isinstance(THEIRS[name], bool) else 3}
    with pytest.raises(ConfigError, match=f"^{name} is {given[name]}: .*; (leave it out|pass )"):
        SamplingParams(**given)


def test_what_means_all_or_none_is_kept_as_its_default() -> None:
    assert SamplingParams(top_k=-1, seed=-1) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_p": 1.5}, r"min_p is 1\.5, expected from 0 \(all\) to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected above 0, and finite"),
        ({"repetition_penalty": np.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": 2.1}, r"presence_penalty is 2\.1, expected from -2 to 2"),
        ({"frequency_penalty": np.nan}, "frequency_penalty is nan, expected"),
        ({"n": 0}, "n is 0, expected 1 or more"),
        (
            {"n": 2, "temperature": 0},
            r"n is 2, but temperature 0 \(greedy\) gives equal answers; pass a temperature",
        ),
        ({"logprobs": -2}, r"logprobs is -2, expected -1 \(all tokens\) or more"),
        ({"stop": ""}, "stop is '', expected strings that are not empty"),
        ({"stop": ["a", ""]}, r"stop is \['a', ''\], expected strings"),
        ({"stop": 3}, r"stop is 3 \(int\), expected str or Sequence or None"),
        ({"stop": {"a": 1}}, r"stop is {'a': 1} \(dict\), expected str or Sequence"),
        ({"logit_bias": [3]}, r"logit_bias is \[3\] \(list\), expected Mapping or None"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias holds token id -1"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias holds a str"),
        (
            {"logit_bias": {5: np.inf}},
            "logit_bias of 5 is inf, expected a number that float32",
        ),
        ({"logit_bias": {5: 1e300}}, r"logit_bias of 5 is 1e\+300, expected a number that float32"),
        (
            {"structured_outputs": "yes|no"},
            r"structured_outputs is 'yes|no' .*, expected Struct",
        ),
        ({"logit_bias": {5: True}}, "logit_bias of 5 is True"),
        ({"min_tokens": 17}, "min_tokens is 17, more than max_tokens, 16; pass fewer, or a larger"),
        ({"ignore_eos": 1}, r"ignore_eos is 1 \(int\), expected bool"),
        ({"detokenize": False, "stop": "a"}, r"stop is \('a',\), strings of the text that detok"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty: no token can be chosen"),
        ({"allowed_token_ids": 5}, r"allowed_token_ids is 5 \(int\), expected Collection or None"),
        ({"bad_words": [""]}, r"bad_words is \[''\], expected strings that are not empty"),
        ({"logprobs": True}, r"logprobs is True \(bool\), expected int or None"),
    ],
)
def test_a_value_without_a_meaning_is_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs has nothing, expected one of json, regex and grammar"),
        ({"json": "{}", "regex": "a"}, "structured_outputs has json and regex, expected one"),
        ({"json": 3}, r"json is 3 \(int\), expected str or Mapping or None"),
        ({"regex": {}}, r"regex is {} \(dict\), expected str or None"),
    ],
)
def test_structured_output_is_asked_for_in_one_way(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StructuredOutputsParams(**fields)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")


@pytest.mark.parametrize(
    ("fields", "changes", "reads"),
    [
        ({}, False, False),
        ({"temperature": 1.0, "min_p": 0.5, "top_k": 3, "logprobs": 5}, False, False),
        ({"stop": "a"}, False, True),
        ({"logit_bias": {3: 1}}, True, False),
        ({"logit_bias": {}}, False, False),
        ({"bad_words": ["a"]}, True, True),
        ({"bad_words": []}, False, False),
        ({"allowed_token_ids": [3]}, True, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"presence_penalty": -1}, True, False),
        ({"frequency_penalty": 0.1}, True, False),
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, True, True),
    ],
)
def test_parameters_say_whether_logits_change_and_text_is_read(
    fields: Any, changes: bool, reads: bool
) -> None:
    params = SamplingParams(**fields)
    assert (params.changes_logits, params.needs_text) == (changes, reads)
