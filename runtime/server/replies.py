"""Reply: the objects of completions and chats as vLLM 0.33 writes them, encoded once."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Logprobs, Token

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """Return one event of a stream."""
    return b"data: " + _encode(value) + b"\n\n"


@dataclass
class Choice:
    """One answer so far."""

    prompt_tokens: Sequence[int]
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    completion_tokens: int = 0  # the stop token among them
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, token: Token) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self.text += token.text
        self.completion_tokens += 1
        self.finish_reason, self.stop_reason = token.finish_reason, token.stop_reason


class Reply:
    """Builds the objects of one HTTP request, in one of the two shapes."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        model: str,
        *,
        is_chat: bool,
        request_id: str | None,
        top: int | None,
        with_ids: bool = False,
    ) -> None:
        """Begin.

        Args:
            tokenizer: turns tokens with log probabilities into text.
            model: as the request calls it.
            is_chat: `chat.completion` instead of `text_completion`.
            request_id: that the client has given.
            top: most probable tokens that are listed beside each; None lists no log probabilities.
            with_ids: list the token ids, too.
        """
        prefix = "chatcmpl-" if is_chat else "cmpl-"
        self._id = prefix + (request_id or uuid.uuid4().hex)
        self._head = {"id": self._id, "created": int(time.time()), "model": model}
        self._tokenizer, self._is_chat, self._top = tokenizer, is_chat, top
        self._with_ids = with_ids

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the body of an answer that is not streamed."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        listed = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return _encode({"object": kind, **self._head, "choices": listed, "usage": usage(choices)})

    def role(self, index: int, counted: Mapping[str, int] | None) -> bytes:
        """Return the first event of a chat's choice."""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": index, "delta": delta, "finish_reason": None}], counted)

    def chunk(
        self, index: int, tokens: Sequence[Token], counted: Mapping[str, int] | None
    ) -> bytes:
        """Return the event of tokens of one choice."""
        text, last = "".join(token.text for token in tokens), tokens[-1]
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": text}} if self._is_chat else {"text": text}
        choice |= {"logprobs": self._logprobs(tokens), "finish_reason": last.finish_reason}
        if last.finish_reason is not None:
            choice["stop_reason"] = last.stop_reason
        if self._with_ids:
            choice["token_ids"] = _ids(tokens)
        return self._event([choice], counted)

    def last(self, counted: Mapping[str, int]) -> bytes:
        """Return the event that tells how many tokens there were."""
        return self._event([], counted)

    def _event(self, choices: Sequence[Any], counted: Mapping[str, int] | None) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return event(
            {"object": kind, **self._head, "choices": choices}
            | ({} if counted is None else {"usage": counted})
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index}
        if self._is_chat:
            found["message"] = {"role": "assistant", "content": choice.text}
        else:
            found["text"] = choice.text
        found |= {
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._with_ids:
            found["token_ids"] = _ids(choice.tokens)
            found["prompt_token_ids"] = list(choice.prompt_tokens)
        return found

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._top is None:
            return None
        steps = [(t.token_id, t.logprobs) for t in tokens if t.token_id is not None]
        if self._is_chat:
            return {"content": [self._chat_logprob(i, known) for i, known in steps if known]}
        texts = [self._text(token) for token, _ in steps]
        return {
            "tokens": texts,
            "token_logprobs": [known[i].logprob for i, known in steps if known],
            "top_logprobs": [
                {self._text(i): p.logprob for i, p in known.items()} for _, known in steps if known
            ],
            "text_offset": [sum(map(len, texts[:place])) for place in range(len(texts))],
        }

    def _chat_logprob(self, token: int, known: Logprobs) -> dict[str, Any]:
        best = sorted(known.items(), key=lambda each: each[1].rank)[: self._top]
        return self._one(token, known[token].logprob) | {
            "top_logprobs": [self._one(i, p.logprob) for i, p in best]
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Return how many tokens went in and came out; a prompt of n answers counts once."""
    prompts = {id(choice.prompt_tokens): len(choice.prompt_tokens) for choice in choices}
    made = sum(choice.completion_tokens for choice in choices)
    given = sum(prompts.values())
    return {"prompt_tokens": given, "total_tokens": given + made, "completion_tokens": made}


def _ids(tokens: Sequence[Token]) -> list[int]:
    return [token.token_id for token in tokens if token.token_id is not None]
