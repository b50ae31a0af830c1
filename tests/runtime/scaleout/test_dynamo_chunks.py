"""Tokens as Dynamo's front end takes them."""

from typing import Any

from trt_lora.runtime import SamplingParams
from trt_lora.runtime.generation.token import Logprob, Token
from trt_lora.runtime.scaleout.dynamo_chunks import DynamoChunks
from trt_lora.runtime.scaleout.dynamo_requests import TokenRequest


def chunks_of(*tokens: Token, visible: frozenset[int] = frozenset()) -> list[dict[str, Any]]:
    """The chunks of an answer to two tokens."""
    chunks = DynamoChunks(TokenRequest((1, 2), SamplingParams(), "base", None, visible))
    return [chunks.chunk(0, token) for token in tokens]


def test_log_probabilities_come_with_their_tokens() -> None:
    known = {7: Logprob(-0.5, 2), 8: Logprob(-0.25, 1)}
    prompt = (None, {2: Logprob(-1.0, 3)})
    (chunk,) = chunks_of(Token(0, 7, logprobs=known, prompt_logprobs=prompt))
    assert chunk == {
        "token_ids": [7],
        "index": 0,
        "log_probs": [-0.5],
        "top_logprobs": [
            [
                {"token_id": 7, "token": None, "logprob": -0.5, "rank": 2},
                {"token_id": 8, "token": None, "logprob": -0.25, "rank": 1},
            ]
        ],
        "engine_data": {"prompt_logprobs": [None, {"2": {"logprob": -1.0, "rank": 3}}]},
    }


def test_a_stop_token_comes_only_where_it_shall_be_seen() -> None:
    last = Token(0, None, "stop", stop_reason=5, stop_token=5)
    first, hidden = chunks_of(Token(0, 7), last)
    assert first == {"token_ids": [7], "index": 0}
    assert (hidden["token_ids"], hidden["finish_reason"], hidden["stop_reason"]) == ([], "stop", 5)
    assert hidden["completion_usage"]["completion_tokens"] == 1
    _, seen = chunks_of(Token(0, 7), last, visible=frozenset({5}))
    assert (seen["token_ids"], seen["completion_usage"]["completion_tokens"]) == ([5], 2)
