"""TritonAnswer: one request's tokens as outputs of a model, one response each or all in one."""

import json
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import FinishReason, Logprobs, Token
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.scaleout.triton.asked import Asked


class TritonReply(Protocol):
    """Where the responses of one request go."""

    def send(self, outputs: Mapping[str, Array], *, is_last: bool) -> None:
        """Send outputs by name, each of shape [values]."""

    def end(self) -> None:
        """Send the last response, without outputs."""

    def fail(self, message: str) -> None:
        """Send the last response, an error."""

    def is_cancelled(self) -> bool:
        """Whether nobody waits for it any more."""
        ...


class TritonAnswer:
    """Makes responses of tokens.

    Where a request streams, its end is a response without outputs.
    """

    def __init__(
        self, asked: Asked, reply: TritonReply, request: Sequence, tokenizer: TextTokenizer | None
    ) -> None:
        """Begin with nothing."""
        self.asked, self.reply, self.adapter = asked, reply, request.adapter
        self.prompt_tokens, self.is_begun = len(request.prompt), False
        self._tokenizer = tokenizer
        self.finish_reason: FinishReason | None = None
        self._text = asked.prompt if asked.prepends and isinstance(asked.prompt, str) else ""
        self._ids: list[int] = []
        self._logprobs: list[Logprobs] = []

    def take(self, token: Token) -> None:
        """Take a token."""
        self.is_begun, self.finish_reason = True, token.finish_reason
        self._text += token.text
        if token.token_id is not None:
            self._ids.append(token.token_id)
        if token.logprobs is not None:
            self._logprobs.append(token.logprobs)

    def respond(self) -> None:
        """Send what has come since the last response, if it is time."""
        is_ended = self.finish_reason is not None
        if self.asked.streams:
            self.reply.send(self._outputs(), is_last=False)
            self._text, self._ids, self._logprobs = "", [], []
            if is_ended:
                self.reply.end()
        elif is_ended:
            self.reply.send(self._outputs(), is_last=True)

    def _outputs(self) -> dict[str, Array]:
        """What has come since the last response; what there is nothing of is left out."""
        found: dict[str, Array] = {"text_output": _strings(self._text)}
        if self._ids:
            found["token_id"] = np.array(self._ids, np.int32)
        if self._logprobs:
            found["logprobs"] = _strings(json.dumps([*map(self._listed, self._logprobs)]))
        if self.finish_reason is not None:
            found["finish_reason"] = _strings(self.finish_reason)
        return found

    def _listed(self, known: Logprobs) -> dict[str, dict[str, object]]:
        """Log probabilities of one place, as vLLM's backend writes them."""
        return {
            str(token): {"logprob": p.logprob, "rank": p.rank, "decoded_token": self._word(token)}
            for token, p in known.items()
        }

    def _word(self, token: int) -> str | None:
        tokenizer = self._tokenizer
        return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


def _strings(text: str) -> Array:
    return np.array([text.encode()], np.object_)
