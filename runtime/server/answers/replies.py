"""Reply: the objects of completions and chats as vLLM 0.33 writes them, encoded once."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Logprobs, PromptLogprobs, Token
from trt_lora.runtime.server.answers.bodies import ChatBody, CompletionBody

DONE, KEEP_ALIVE = b"data: [DONE]\n\n", b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass
class Choice:
    """One answer so far."""

    prompt_tokens: Sequence[int]
    tokens: list[Token] = field(default_factory=list)  # the stop token, without an id, is the last
    prompt_logprobs: PromptLogprobs | None = None
    listed: int = 0  # characters of the tokens that were told with their log probabilities

    def add(self, token: Token) -> None:
        """Take the next token."""
        self.tokens.append(token)
        if token.prompt_logprobs is not None:
            self.prompt_logprobs = token.prompt_logprobs

    @property
    def text(self) -> str:
        """What was said so far."""
        return "".join(token.text for token in self.tokens)


class Reply:
    """Builds the objects of one HTTP request, in one of the two shapes."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        model: str,
        body: CompletionBody | ChatBody,
        *,
        request_id: str | None,
        tokens_as_ids: bool = False,
    ) -> None:
        """Begin.

        Args:
            tokenizer: turns tokens with log probabilities into text.
            model: as the request calls it.
            body: what is asked for.
            request_id: that the client has given.
            tokens_as_ids: tokens with log probabilities are called "token_id:7".
        """
        self._is_chat = isinstance(body, ChatBody)
        prefix = "chatcmpl-" if self._is_chat else "cmpl-"
        identity = prefix + (request_id or uuid.uuid4().hex)
        self._head = {"id": identity, "created": int(time.time()), "model": model}
        self._tokenizer, self._body, self._top = tokenizer, body, body.wanted_logprobs
        self._as_ids = tokens_as_ids or body.return_tokens_as_token_ids
        self._is_plain = self._top is None and not body.return_token_ids  # no more than text
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # of plain events, by choice

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return the body of an answer that is not streamed."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        listed = [self._choice(index, choice) for index, choice in enumerate(choices)]
        answer = {"object": kind, **self._head, "choices": listed, "usage": usage(choices)}
        if self._is_chat:
            answer |= self._of_prompt(choices[0])
        return _encode(answer)

    def first(
        self, choices: Sequence[Choice], counted: Mapping[str, int] | None
    ) -> Iterator[bytes]:
        """Yield the events before any token: of a chat the role of each choice."""
        if not self._is_chat:
            return
        for index, choice in enumerate(choices):
            delta = {"role": "assistant", "content": ""}
            shown = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            more = {"prompt_token_ids": choice.prompt_tokens} if self._body.return_token_ids else {}
            yield self._event([shown], counted, more)

    def chunk(
        self,
        index: int,
        choice: Choice,
        tokens: Sequence[Token],
        counted: Mapping[str, int] | None,
    ) -> bytes:
        """Return the event of the last tokens of a choice."""
        text, last = "".join([token.text for token in tokens]), tokens[-1]
        is_first = len(tokens) == len(choice.tokens)
        if self._is_plain and not is_first and last.finish_reason is None and counted is None:
            before, behind = self._frame(index)
            return before + _encode(text) + behind
        echoes = self._body.echo and is_first
        shown: dict[str, Any] = {"index": index}
        if self._is_chat:
            shown["delta"] = {"content": text}
        else:
            shown["text"] = self._prompt_text(choice) + text if echoes else text
        shown["logprobs"] = self._logprobs(choice, tokens, echoes=echoes)
        shown["finish_reason"] = last.finish_reason
        if last.finish_reason is not None:
            shown["stop_reason"] = last.stop_reason
        if self._body.return_token_ids:
            shown["token_ids"] = _ids(tokens)
        if is_first and not self._is_chat:
            asked = self._of_prompt(choice).items()
            shown |= {name: value for name, value in asked if value is not None}
        return self._event([shown], counted)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What lies before and behind the text of an event that has nothing else: most of them."""
        if index not in self._frames:
            delta = {"delta": {"content": ""}} if self._is_chat else {"text": ""}
            shown = {"index": index, **delta, "logprobs": None, "finish_reason": None}
            before, _, behind = self._event([shown], None).rpartition(b'""')
            self._frames[index] = before, behind
        return self._frames[index]

    def last(self, counted: Mapping[str, int]) -> bytes:
        """Return the event that tells how many tokens there were."""
        return self._event([], counted)

    def _event(
        self,
        choices: Sequence[Any],
        counted: Mapping[str, int] | None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        value: dict[str, Any] = {"object": kind, **self._head, "choices": choices, **(more or {})}
        if counted is not None:
            value["usage"] = counted
        return b"data: " + _encode(value) + b"\n\n"

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text, last = choice.text, choice.tokens[-1]
        if self._body.echo:
            text = self._prompt_text(choice) + text
        shown: dict[str, Any] = {"index": index}
        if self._is_chat:
            shown["message"] = {"role": "assistant", "content": text}
        else:
            shown["text"] = text
        shown["logprobs"] = self._logprobs(choice, choice.tokens, echoes=self._body.echo)
        shown |= {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
        shown["token_ids"] = _ids(choice.tokens) if self._body.return_token_ids else None
        return shown if self._is_chat else shown | self._of_prompt(choice)

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """What was asked of the prompt, null where nothing was."""
        known = choice.prompt_logprobs or ()
        is_asked = self._body.prompt_logprobs is not None
        return {
            "prompt_token_ids": choice.prompt_tokens if self._body.return_token_ids else None,
            "prompt_logprobs": [e and self._ranked(e) for e in known] if is_asked else None,
        }

    def _prompt_text(self, choice: Choice) -> str:
        if isinstance(self._body, ChatBody):  # vLLM echoes the last message
            return str(self._body.messages[-1].get("content") or "")
        if isinstance(self._body.prompt, str):
            return self._body.prompt
        return self._tokenizer.decode(list(choice.prompt_tokens), skip_special_tokens=False)

    def _logprobs(
        self, choice: Choice, tokens: Sequence[Token], *, echoes: bool
    ) -> dict[str, Any] | None:
        """Log probabilities of tokens, behind those of the prompt where that is echoed."""
        if self._top is None:
            return None
        steps = [(t.token_id, t.logprobs) for t in tokens if t.token_id is not None]
        if self._is_chat:
            return {"content": [self._chat_logprob(i, known) for i, known in steps if known]}
        listed: list[tuple[int, Logprobs | None]] = []
        if echoes:
            known = choice.prompt_logprobs or [None] * len(choice.prompt_tokens)
            listed += zip(choice.prompt_tokens, known, strict=True)
        listed += steps
        lengths = [len(self._text(token)) for token, _ in listed]
        *offsets, choice.listed = accumulate(lengths, initial=choice.listed)
        return {
            "tokens": [self._called(token) for token, _ in listed],
            "token_logprobs": [known and known[token].logprob for token, known in listed],
            "top_logprobs": [
                known and {self._called(i): p.logprob for i, p in self._best(token, known)}
                for token, known in listed
            ],
            "text_offset": offsets,
        }

    def _best(self, token: int, known: Logprobs) -> list[tuple[int, Any]]:
        """The most probable tokens, and the chosen one."""
        return [(i, p) for i, p in known.items() if p.rank <= (self._top or 0) or i == token]

    def _chat_logprob(self, token: int, known: Logprobs) -> dict[str, Any]:
        best = sorted(known.items(), key=lambda each: each[1].rank)[: self._top]
        return self._one(token, known[token].logprob) | {
            "top_logprobs": [self._one(i, p.logprob) for i, p in best]
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": self._called(token), "logprob": logprob, "bytes": list(text.encode())}

    def _ranked(self, known: Logprobs) -> dict[str, Any]:
        return {
            str(i): {"logprob": p.logprob, "rank": p.rank, "decoded_token": self._text(i)}
            for i, p in known.items()
        }

    def _called(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._text(token)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Return how many tokens went in and came out; a prompt of n answers counts once."""
    prompts = {id(choice.prompt_tokens): len(choice.prompt_tokens) for choice in choices}
    made = sum(len(choice.tokens) for choice in choices)
    given = sum(prompts.values())
    return {"prompt_tokens": given, "total_tokens": given + made, "completion_tokens": made}


def _ids(tokens: Sequence[Token]) -> list[int]:
    return [token.token_id for token in tokens if token.token_id is not None]
