"""Bodies of answers in tests: what they ask for, and what they are refused for."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.server.answers.bodies import AnswerBody, ChatBody, CompletionBody
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.json_values import decoded

MODEL = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=99)  # what the model says
KINDS: tuple[type[AnswerBody], ...] = (CompletionBody, ChatBody)


def body(kind: type[AnswerBody] = CompletionBody, /, **fields: Any) -> Any:
    needed: Mapping[str, Any] = {"prompt": "hello"}
    if kind is ChatBody:
        needed = {"messages": [{"role": "user", "content": "hello"}]}
    return decoded(json.dumps({**needed, **fields}).encode(), kind)


def sampling(kind: type[AnswerBody] = CompletionBody, /, **fields: Any) -> SamplingParams:
    found: SamplingParams = body(kind, **fields).sampling(MODEL, 20)
    return found


def look_at_all_of(kind: type[AnswerBody], fields: Mapping[str, Any]) -> None:
    made = body(kind, **fields)
    made.sampling(MODEL, 20)
    made.prompts()


def refusal(kind: type[AnswerBody] = CompletionBody, /, **fields: Any) -> HttpError:
    with pytest.raises(HttpError) as raised:
        look_at_all_of(kind, fields)
    assert raised.value.status == 400
    return raised.value
