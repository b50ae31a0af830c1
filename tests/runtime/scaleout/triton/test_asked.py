"""Requests to Triton's model: three clients' words for the same, and what is refused by name."""

import re
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.scaleout.triton.asked import Asked, read_asked

FOLDER = files("trt_lora.runtime.scaleout.triton")
CONFIG = FOLDER.joinpath("config.pbtxt").read_text()


def asked(parameters: str = "", /, **inputs: Any) -> Asked:
    """What is asked for by inputs [1] or [n], with a prompt."""
    given = {"text_input": "hi", **inputs}
    return read_asked({n: _array(v) for n, v in given.items() if v is not None}, parameters)


def _array(value: Any) -> Any:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0] if values else 0, str):
        return np.array([each.encode() for each in values], np.object_)
    return np.array(values)


@pytest.mark.parametrize("before", [(), (1,), (1, 1)])
def test_inputs_have_dimensions_of_one_before_their_own_or_none(before: tuple[int, ...]) -> None:
    ids = np.array([5, 6], np.int32).reshape(*before, 2)
    most = np.array([7], np.int32).reshape(*before, 1)
    found = read_asked({"input_ids": ids, "max_tokens": most}, "")
    assert (found.prompt, found.sampling) == ([5, 6], {"max_tokens": 7})


def test_an_input_goes_before_sampling_parameters_and_those_before_the_request_s() -> None:
    text = '{"temperature": 0.2, "top_k": 2}'
    given = '{"temperature": 0.1, "top_k": 1, "min_p": 0.1}'
    found = asked(given, sampling_parameters=text, temperature=np.float32(0.5))
    assert found.sampling == {"temperature": 0.5, "top_k": 2, "min_p": 0.1}


@pytest.mark.parametrize(
    ("inputs", "fields"),
    [
        ({"stop_words": ["a", ""], "bad_words": [""]}, {"stop": ["a"], "bad_words": None}),
        ({"min_length": 2, "random_seed": 3}, {"min_tokens": 2, "seed": 3}),
        ({"top_p": 0.0, "top_k": 5}, {"top_p": None, "top_k": 5}),
        ({"end_id": 2, "pad_id": 0, "length_penalty": 2.0}, {"stop_token_ids": [2]}),
        ({"beam_width": 1, "return_log_probs": False}, {}),
        ({"return_log_probs": True}, {"logprobs": 0}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, None),
    ],
)
def test_inputs_of_tensorrt_llms_model_are_sampling_parameters(inputs: Any, fields: Any) -> None:
    assert asked(**inputs).sampling == (inputs if fields is None else fields)


def test_an_adapter_is_an_input_or_a_sampling_parameter_and_an_empty_name_is_the_base() -> None:
    assert asked(lora_name="a").adapter == "a"
    assert asked(sampling_parameters='{"lora_name": "b"}').adapter == "b"
    assert asked('{"lora_name": "c"}', lora_name="d").adapter == "d"
    assert asked(lora_name="").adapter is None
    assert asked().task.lora_task_id is None
    assert asked(lora_task_id=(1 << 64) - 1).task.lora_task_id == (1 << 64) - 1


def test_a_whole_answer_to_text_may_have_the_prompt_before_it() -> None:
    assert asked(exclude_input_in_output=False).prepends
    assert not asked(exclude_input_in_output=True).prepends
    assert not asked().prepends
    assert asked(stream=True).streams
    assert not asked(stream=False).streams


@pytest.mark.parametrize(
    ("parameters", "inputs", "message"),
    [
        ("", {"text_input": None}, "a prompt is text_input or input_ids"),
        ("", {"input_ids": [5]}, "a prompt is text_input or input_ids"),
        ("", {"max_tokens": [5, 6]}, r"max_tokens has shape \[2\], expected one value"),
        ("", {"input_ids": [[5], [6]], "text_input": None}, "expected those of one request"),
        ("", {"beam_width": 2}, "beam_width is 2, expected 1"),
        ("", {"sampling_parameters": "{"}, "sampling_parameters is '{', which is no JSON"),
        ("", {"sampling_parameters": "[1]"}, "expected an object"),
        ("[" * 100_000, {}, "the request's parameters is .* no JSON"),
        ("", {"lora_name": "a", "lora_task_id": 5}, "lora_name is 'a' and lora_task_id is 5"),
        ('{"lora_name": 5}', {}, "lora_name is 5"),
        ("", {"exclude_input_in_output": False, "stream": True}, "no whole text"),
        ("", {"lora_task_id": 5, "lora_weights": [[0.5]]}, "lora_config is missing"),
        ("", {"lora_weights": [[0.5]], "lora_config": [[1, 0, 1]]}, "lora_task_id must be set"),
    ],
)
def test_what_has_no_meaning_is_refused(parameters: str, inputs: Any, message: str) -> None:
    with pytest.raises(LoRAError, match=message):
        asked(parameters, **inputs)


def test_what_is_no_text_is_refused() -> None:
    given = {"text_input": np.array([b"\xff"], np.object_)}
    with pytest.raises(LoRAError, match=r"text_input is .* expected text in UTF-8"):
        read_asked(given, "")


def test_the_configuration_names_every_input_and_output_that_the_model_knows() -> None:
    code = "".join(FOLDER.joinpath(f"{name}.py").read_text() for name in ("asked", "answer"))
    named = re.findall(r'name: "(\w+)"', CONFIG)
    known = set(re.findall(r'"(\w+)": ?_|inputs?\.get\("(\w+)"|inputs, "(\w+)"', code))
    assert all(f'"{name}"' in code for name in named)
    assert {name for names in known for name in names if name} <= set(named)
    assert "decoupled: true" in CONFIG
