"""What Dynamo's front end asks for: each field is ours, or refused by its name."""

from dataclasses import replace
from typing import Any

import pytest

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import SamplingParams, StructuredOutputsParams
from trt_lora.runtime.scaleout.dynamo_requests import TokenRequest, token_request

DEFAULTS = SamplingParams(temperature=0.7, top_k=5)
# All that a front end of 1.6.1 sends where nothing is asked for.
NOTHING: dict[str, Any] = {
    "model": "base",
    "token_ids": [1, 2],
    "stop_conditions": dict.fromkeys(
        (
            *("max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "min_tokens"),
            *("stop_token_ids_hidden", "ignore_eos", "max_thinking_tokens"),
        )
    ),
    "sampling_options": dict.fromkeys(
        (
            *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty"),
            *("temperature", "top_p", "top_k", "min_p", "use_beam_search", "length_penalty"),
            *("seed", "include_stop_str_in_output", "guided_decoding"),
        )
    ),
    "output_options": dict.fromkeys(
        (
            *("logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt"),
            *("return_tokens_as_token_ids", "no_stop_trim"),
        )
    ),
    "eos_token_ids": [2],
    "mdc_sum": "5048",
    "annotations": [],
    "routing": {},
    "router_config_override": None,
}
SAMPLING, STOP, OUTPUT = "sampling_options", "stop_conditions", "output_options"


def understood(**groups: Any) -> TokenRequest:
    """What is understood of groups of options, beside all that is left alone."""
    merged = {
        name: NOTHING[name] | value if isinstance(value, dict) and name in NOTHING else value
        for name, value in groups.items()
    }
    return token_request(NOTHING | merged, DEFAULTS)


def test_what_is_not_asked_for_is_the_models() -> None:
    found = understood()
    expected = replace(DEFAULTS, max_tokens=None, stop_token_ids=[], detokenize=False)
    assert found.sampling == expected
    assert (found.prompt, found.model, found.salt) == ((1, 2), "base", None)


@pytest.mark.parametrize(
    ("group", "name", "value", "ours"),
    [
        (SAMPLING, "n", 2, {"n": 2}),
        (SAMPLING, "best_of", 1, {}),
        (SAMPLING, "presence_penalty", 0.5, {"presence_penalty": 0.5}),
        (SAMPLING, "frequency_penalty", 0.5, {"frequency_penalty": 0.5}),
        (SAMPLING, "repetition_penalty", 1.5, {"repetition_penalty": 1.5}),
        (SAMPLING, "temperature", 0.0, {"temperature": 0.0}),
        (SAMPLING, "top_p", 0.5, {"top_p": 0.5}),
        (SAMPLING, "top_k", -1, {"top_k": 0}),
        (SAMPLING, "min_p", 0.5, {"min_p": 0.5}),
        (SAMPLING, "use_beam_search", False, {}),
        (SAMPLING, "length_penalty", 1.0, {}),
        (SAMPLING, "seed", 7, {"seed": 7}),
        (SAMPLING, "include_stop_str_in_output", True, {}),  # the front end's
        (STOP, "max_tokens", 9, {"max_tokens": 9}),
        (STOP, "stop", ["x"], {"stop": ("x",), "detokenize": True}),
        (STOP, "stop_token_ids", [4], {"stop_token_ids": (4,)}),
        (STOP, "stop_token_ids_visible", [5], {"stop_token_ids": (5,)}),
        (STOP, "stop_token_ids_hidden", [6], {"stop_token_ids": (6,)}),
        (STOP, "min_tokens", 3, {"min_tokens": 3}),
        (STOP, "ignore_eos", True, {"ignore_eos": True}),
        (OUTPUT, "logprobs", 0, {"logprobs": 0}),
        (OUTPUT, "logprobs", (1 << 32) - 1, {"logprobs": -1}),
        (OUTPUT, "prompt_logprobs", 2, {"prompt_logprobs": 2}),
        (OUTPUT, "skip_special_tokens", False, {}),
        (OUTPUT, "return_tokens_as_token_ids", True, {}),
        ("extra_args", SAMPLING, {"allowed_token_ids": [3]}, {"allowed_token_ids": (3,)}),
        ("extra_args", SAMPLING, {"bad_words_token_ids": []}, {}),
        ("extra_args", SAMPLING, {"logprob_token_ids": [3]}, {"logprob_token_ids": (3,)}),
        ("extra_args", "nvext", {"anything": 1}, {}),
    ],
)
def test_a_field_is_honoured(group: str, name: str, value: object, ours: dict[str, Any]) -> None:
    plain = understood().sampling
    assert understood(**{group: {name: value}}).sampling == replace(plain, **ours)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        (SAMPLING, "best_of", 2),
        (SAMPLING, "use_beam_search", True),
        (SAMPLING, "length_penalty", 2.0),
        (SAMPLING, "temperature", -1.0),
        (SAMPLING, "seed", 1 << 64),
        (SAMPLING, "of_tomorrow", 1),
        (STOP, "max_thinking_tokens", 5),
        (STOP, "max_tokens", 0),
        (OUTPUT, "of_tomorrow", True),
        ("extra_args", "kv_transfer_params", {"a": 1}),
        ("extra_args", "bad_words_token_ids", [[3]]),
        ("extra_args", "thinking_token_budget", 3),
    ],
)
def test_a_field_is_refused_by_name(group: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        understood(**{group: {name: value}})


@pytest.mark.parametrize(
    "name",
    [
        *("prompt_embeds", "multi_modal_data", "mm_processor_kwargs", "encoder_result"),
        *("prefill_result", "bootstrap_info", "require_reasoning"),
    ],
)
def test_an_input_that_is_no_tokens_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is given"):
        understood(**{name: {"a": 1}})


@pytest.mark.parametrize(
    ("guide", "ours"),
    [
        ({"json": {"type": "object"}}, StructuredOutputsParams(json={"type": "object"})),
        ({"regex": "a+", "backend": "xgrammar"}, StructuredOutputsParams(regex="a+")),
        ({"grammar": 'start: "a"'}, StructuredOutputsParams(grammar='start: "a"')),
        ({"choice": ["a", "b"]}, StructuredOutputsParams(grammar='start: "a" | "b"')),
        ({"json": None, "regex": None}, None),
    ],
)
def test_guided_decoding_is_structured_output(
    guide: dict[str, Any], ours: StructuredOutputsParams | None
) -> None:
    found = understood(sampling_options={"guided_decoding": guide})
    assert found.sampling.structured_outputs == ours


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        ({"whitespace_pattern": "x"}, "whitespace_pattern"),
        ({"structural_tag": {"a": 1}}, "structural_tag"),
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"choice": "abc"}, "choice"),
    ],
)
def test_other_guides_are_refused_by_name(guide: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"guided_decoding.*{message}"):
        understood(sampling_options={"guided_decoding": guide})


def test_the_adapter_is_what_routing_says_and_prefixes_are_shared_by_its_salt() -> None:
    found = understood(model="a", routing={"lora_name": "b", "cache_salt": "s", "priority": 3})
    assert (found.model, found.salt) == ("b", "s")
    assert understood(model="a").model == "a"


def test_visible_stop_tokens_are_known() -> None:
    assert understood(stop_conditions={"stop_token_ids_visible": [5]}).visible_stops == {5}
