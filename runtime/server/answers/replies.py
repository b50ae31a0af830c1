"""Reply: the objects of completions and chats as vLLM 0.33 writes them, encoded once."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.server.answers.bodies import ChatBody, CompletionBody
from trt_lora.runtime.server.answers.choices import Choice
from trt_lora.runtime.server.answers.listed_logprobs import Listed, LogprobLists

DONE, KEEP_ALIVE = b"data: [DONE]\n\n", b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


class Reply:
    """Builds the objects of one HTTP request, in one of the two shapes."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        model: str,
        body: CompletionBody | ChatBody,
        *,
        request_id: str,
        tokens_as_ids: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        """Begin.

        Args:
            tokenizer: turns tokens with log probabilities into text.
            model: as the request calls it.
            body: what is asked for.
            request_id: that the client has given, or another one.
            tokens_as_ids: tokens with log probabilities are called "token_id:7".
            fingerprint: of the model and what serves it.
        """
        self._is_chat = isinstance(body, ChatBody)
        prefix = "chatcmpl-" if self._is_chat else "cmpl-"
        self.id = prefix + request_id
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._tokenizer, self._body, self._fingerprint = tokenizer, body, fingerprint
        as_ids = body.return_tokens_as_token_ids
        as_ids = tokens_as_ids if as_ids is None else as_ids
        self._lists = LogprobLists(tokenizer, body, as_ids=as_ids)
        self._is_plain = not (self._lists.is_asked or body.return_token_ids)  # no more than text
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # of plain events, by choice

    def whole(self, choices: Sequence[Choice], counted: Mapping[str, Any], **more: Any) -> bytes:
        """Return the body of an answer that is not streamed; `more` is told of it as a whole."""
        kind = "chat.completion" if self._is_chat else "text_completion"
        listed = [self._choice(index, choice) for index, choice in enumerate(choices)]
        answer = {"object": kind, **self._head, "choices": listed, "usage": counted, **more}
        answer["system_fingerprint"] = self._fingerprint
        if self._is_chat:
            answer |= self._of_prompt(choices[0])
        if self._wants_prompt_text:
            answer["prompt_text"] = choices[0].prompt.text
        return _encode(answer)

    def first(
        self, choices: Sequence[Choice], counted: Mapping[str, Any] | None
    ) -> Iterator[bytes]:
        """Yield the events before any token: of a chat the role of each choice, and the echo."""
        if not isinstance(self._body, ChatBody):
            return
        more: dict[str, Any] = {}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = choices[0].prompt.ids
        if self._wants_prompt_text:
            more["prompt_text"] = choices[0].prompt.text
        deltas = [({"role": self._body.role, "content": ""}, more)]
        if self._body.echoed:
            deltas.append(({"content": self._body.echoed}, {}))
        for delta, beside in deltas:
            for index in range(len(choices)):
                shown = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield self._event([shown], counted, beside)

    def chunk(
        self,
        index: int,
        choice: Choice,
        tokens: Sequence[Token],
        counted: Mapping[str, Any] | None,
        *,
        is_end: bool = False,
    ) -> bytes:
        """Return the event of the last tokens of a choice; `is_end`: its end is the stream's."""
        text, last = "".join([token.text for token in tokens]), tokens[-1]
        is_first, choice.told = not choice.told, choice.told + len(tokens)
        if self._is_plain and not is_first and last.finish_reason is None and counted is None:
            before, behind = self._frame(index)
            return before + _encode(text) + behind
        shown: dict[str, Any] = {"index": index}
        if self._is_chat:
            shown["delta"] = {"content": text}
        else:
            shown["text"] = self._with_prompt(choice, text) if is_first else text
        shown["logprobs"] = self._logprobs(choice, tokens, is_first=is_first)
        shown["finish_reason"] = last.finish_reason
        if last.finish_reason is not None:
            shown["stop_reason"] = last.stop_reason
        if self._body.return_token_ids:
            shown["token_ids"] = [_id(token) for token in tokens]
            if is_first and not self._is_chat:
                shown["prompt_token_ids"] = choice.prompt.ids
        more = {"system_fingerprint": self._fingerprint} if is_end else {}
        return self._event([shown], counted, more)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What lies before and behind the text of an event that has nothing else: most of them."""
        if index not in self._frames:
            delta = {"delta": {"content": ""}} if self._is_chat else {"text": ""}
            shown = {"index": index, **delta, "logprobs": None, "finish_reason": None}
            before, _, behind = self._event([shown], None).rpartition(b'""')
            self._frames[index] = before, behind
        return self._frames[index]

    def last(self, counted: Mapping[str, Any], **more: Any) -> bytes:
        """Return the event that tells how many tokens there were; see `whole` for `more`."""
        return self._event([], counted, {"system_fingerprint": self._fingerprint, **more})

    def _event(
        self,
        choices: Sequence[Any],
        counted: Mapping[str, Any] | None,
        more: Mapping[str, Any] | None = None,
    ) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        value: dict[str, Any] = {"object": kind, **self._head, "choices": choices, **(more or {})}
        if counted is not None:
            value["usage"] = counted
        return b"data: " + _encode(value) + b"\n\n"

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text, last = choice.text, choice.tokens[-1]
        shown: dict[str, Any] = {"index": index}
        if isinstance(self._body, ChatBody):
            shown["message"] = {"role": self._body.role, "content": self._body.echoed + text}
        else:
            shown["text"] = self._with_prompt(choice, text)
        shown["logprobs"] = self._logprobs(choice, choice.tokens, is_first=True)
        shown |= {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
        ids = [_id(token) for token in choice.tokens] if self._body.return_token_ids else None
        shown["token_ids"] = ids
        return shown if self._is_chat else shown | self._of_prompt(choice)

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """What was asked of the prompt, null where nothing was."""
        known, told = choice.prompt_logprobs, self._lists.of_prompt
        return {
            "prompt_token_ids": choice.prompt.ids if self._body.return_token_ids else None,
            "prompt_logprobs": None if known is None else [e and told(e) for e in known],
        }

    @property
    def _wants_prompt_text(self) -> bool:
        return isinstance(self._body, ChatBody) and bool(self._body.return_prompt_text)

    @property
    def _has_no_answer(self) -> bool:
        return isinstance(self._body, CompletionBody) and self._body.has_no_answer

    def _with_prompt(self, choice: Choice, text: str) -> str:
        """The text of a completion behind its prompt, where that is echoed."""
        if not self._body.echo:
            return text
        before = choice.prompt.text
        if before is None:
            before = self._tokenizer.decode(choice.prompt.ids, skip_special_tokens=False)
        before = "" if self._body.return_token_ids else before  # as in vLLM: its tokens tell
        return before if self._has_no_answer else before + text

    def _logprobs(
        self, choice: Choice, tokens: Sequence[Token], *, is_first: bool
    ) -> dict[str, Any] | None:
        """Log probabilities of tokens, behind those of the prompt where that is echoed."""
        if not self._lists.is_asked:
            return None
        listed: list[Listed] = [(_id(token), token.logprobs) for token in tokens]
        if self._is_chat:
            return self._lists.of_chat(listed)
        if self._body.echo and is_first:
            known = choice.prompt_logprobs or [None] * len(choice.prompt.ids)
            made = [] if self._has_no_answer else listed
            listed = [*zip(choice.prompt.ids, known, strict=True), *made]
        lists, choice.listed = self._lists.of_completion(listed, choice.listed)
        return lists


def _id(token: Token) -> int:
    """The id of a token, of a stop token, too."""
    found = token.stop_token if token.token_id is None else token.token_id
    assert found is not None
    return found
