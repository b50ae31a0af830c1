"""DynamoChunks: tokens of one request as Dynamo's front end takes them."""

from typing import Any

from trt_lora.runtime.generation.token import Logprobs, PromptLogprobs, Token
from trt_lora.runtime.scaleout.dynamo_requests import TokenRequest


class DynamoChunks:
    """Makes a chunk of each token, and counts what the last one tells."""

    def __init__(self, request: TokenRequest) -> None:
        """Take the request that is answered."""
        self._request, self._given = request, 0

    def chunk(self, index: int, token: Token) -> dict[str, Any]:
        """Return the chunk of a token.

        Args:
            index: which of several answers it belongs to.
            token: None is a stop token, which comes only where the request wants to see it.
        """
        ids = [] if token.token_id is None else [token.token_id]
        if token.stop_token in self._request.visible_stops:
            ids = [token.stop_token]
        self._given += len(ids)
        chunk: dict[str, Any] = {"token_ids": ids, "index": index}
        if ids and token.logprobs is not None and ids[0] in token.logprobs:
            chunk["log_probs"] = [token.logprobs[ids[0]].logprob]
            chunk["top_logprobs"] = [_listed(token.logprobs)]
        if token.prompt_logprobs is not None:
            chunk["engine_data"] = {"prompt_logprobs": _of_prompt(token.prompt_logprobs)}
        return chunk | self._ending(token)

    def cancelled(self) -> dict[str, Any]:
        """Return the last chunk of a request that its client has left."""
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled"} | self._usage()

    def _ending(self, token: Token) -> dict[str, Any]:
        if token.finish_reason is None:
            return {}
        ending = {"finish_reason": token.finish_reason} | self._usage()
        return ending if token.stop_reason is None else ending | {"stop_reason": token.stop_reason}

    def _usage(self) -> dict[str, Any]:
        prompt = len(self._request.prompt)
        counts = {"prompt_tokens": prompt, "completion_tokens": self._given}
        return {"completion_usage": counts | {"total_tokens": prompt + self._given}}


def _listed(known: Logprobs) -> list[dict[str, Any]]:
    """The chosen token, then the most probable ones; the front end knows their text."""
    return [
        {"token_id": token, "token": None, "logprob": found.logprob, "rank": found.rank}
        for token, found in known.items()
    ]


def _of_prompt(known: PromptLogprobs) -> list[dict[str, Any] | None]:
    return [
        None
        if place is None
        else {str(t): {"logprob": p.logprob, "rank": p.rank} for t, p in place.items()}
        for place in known
    ]
