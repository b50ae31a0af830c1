"""Sampling parameters alone, as an object of JSON: vLLM's fields, as its Triton backend has."""

import json
from collections.abc import Mapping
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean, shown
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.server.answers.bodies import SAME_FIELDS, CompletionBody
from trt_lora.runtime.server.answers.refused_fields import RefusedFields
from trt_lora.runtime.server.json_values import decoded

# An answer to come carries nothing of its prompt.
_TAKEN = {*SAME_FIELDS, "max_tokens", "logprobs", "logit_bias"} - {"prompt_logprobs"}
_TAKEN |= {"structured_outputs", "response_format", "use_beam_search"}


def read_object(text: str, what: str) -> dict[str, Any]:
    """Return an object of JSON.

    Raises:
        ConfigError: it is none; the message begins with `what`.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is {shown(text)}, which is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f'{what} is {shown(text)}, expected an object such as {{"top_p": 0.9}}')
    return found


def sampling_from(
    given: Mapping[str, Any], default: SamplingParams, max_logprobs: int
) -> SamplingParams:
    """Return parameters of one answer, read as those of a completion.

    Args:
        given: vLLM's fields by name; numbers may be strings, as vLLM's clients for Triton send.
        default: what the model says.
        max_logprobs: log probabilities beside each token, most.

    Raises:
        ConfigError: a field is unknown, or asks for several answers.
        HttpError: 400, by the name of the field.
    """
    for name in given:
        if name not in _TAKEN and name not in RefusedFields.__struct_fields__:
            raise ConfigError(
                f"{shown(name)} is no sampling parameter, expected some of "
                f"{', '.join(sorted(_TAKEN))}{did_you_mean(name, _TAKEN)}"
            )
    body = decoded(json.dumps({**given, "prompt": ""}).encode(), CompletionBody, strict=False)
    if body.n not in (None, 1):
        raise ConfigError(f"n is {body.n}, expected 1; send a request for each answer")
    return body.sampling(default, max_logprobs)
