"""Answer completions and chats: a body in, one JSON object or a stream of events out."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import cast

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from trt_lora.plugins.errors import (
    AdapterError,
    ConfigError,
    LoRAError,
    OutputError,
    StateError,
    UnknownAdapterError,
)
from trt_lora.runtime.engine import Engine
from trt_lora.runtime.generation.parameters.default_sampling import sampling_of_model
from trt_lora.runtime.generation.text.prompts import prompt_ids
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.server.bodies import AnswerBody, ChatBody, CompletionBody
from trt_lora.runtime.server.bridge import Answers, EngineBridge
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.replies import DONE, Choice, Reply, usage
from trt_lora.runtime.server.served_models import ServedModels
from trt_lora.runtime.store.names import strength_name


class AnswerStream(StreamingResponse):
    """A stream whose requests end with it, also where no chunk was ever asked for."""

    def __init__(self, chunks: AsyncIterator[bytes], answers: Answers) -> None:
        """Take the chunks, and what they come from."""
        super().__init__(chunks, media_type="text/event-stream")
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.close()


@dataclass
class Answering:
    """What answers take: an engine, its loop, and the names of models."""

    engine: Engine
    bridge: EngineBridge
    models: ServedModels
    forces_usage: bool = False

    def __post_init__(self) -> None:
        """Read what the model recommends."""
        self._default = sampling_of_model(self.engine.directory)

    async def answer(
        self, body: CompletionBody | ChatBody, *, request_id: str | None, client: str | None
    ) -> Response:
        """Return the response to a request.

        Raises:
            HttpError: it is refused.
        """
        is_chat = isinstance(body, ChatBody)
        adapter = self._adapter(body)
        top = _top(body)
        sampling = body.sampling(self._default, top)
        ids = await self._encoded(body)
        try:
            answers = self.bridge.submit(
                ids, sampling, adapter=adapter, client=client, salt=body.cache_salt
            )
        except LoRAError as error:
            raise http_error(error) from error
        choices = [Choice(prompt) for prompt in ids for _ in range(sampling.n)]
        reply = Reply(
            self.engine.tokenizer,
            body.model or self.models.base[0],
            is_chat=is_chat,
            request_id=body.request_id or request_id,
            top=top,
            with_ids=body.return_token_ids,
        )
        if body.stream:
            chunks = self._stream(body, answers, choices, reply, is_chat=is_chat)
            return AnswerStream(chunks, answers)
        try:
            await _gather(answers, choices)
        finally:
            answers.close()
        return Response(reply.whole(choices), media_type="application/json")

    async def _stream(
        self,
        body: AnswerBody,
        answers: Answers,
        choices: Sequence[Choice],
        reply: Reply,
        *,
        is_chat: bool,
    ) -> AsyncIterator[bytes]:
        options = body.stream_options
        counts = self.forces_usage or bool(options and options.include_usage)
        always = counts and (self.forces_usage or bool(options and options.continuous_usage_stats))
        try:
            if is_chat:
                for index in range(len(choices)):
                    yield reply.role(index, usage(choices) if always else None)
            left = len(choices)
            while left:
                for index, tokens in _by_choice(await answers.take()).items():
                    for token in tokens:
                        choices[index].add(token)
                    left -= tokens[-1].finish_reason is not None
                    yield reply.chunk(index, tokens, usage(choices) if always else None)
            if counts:
                yield reply.last(usage(choices))
        except HttpError as error:
            yield b"data: " + error.body() + b"\n\n"
        yield DONE

    def _adapter(self, body: AnswerBody) -> str | None:
        name = self.models.adapter(body.lora_path or body.model)
        if body.lora is None:
            return name
        if name is not None or len(body.lora) != 1:
            raise HttpError(400, "lora takes one adapter, and model is then the base model", "lora")
        (part,) = body.lora
        found = self.models.adapter(part.name)
        return None if found is None else strength_name(found, part.scale)

    async def _encoded(self, body: CompletionBody | ChatBody) -> list[list[int]]:
        """The prompts as token ids, made in another thread: a long one takes milliseconds."""

        def encode() -> list[list[int]]:
            tokenizer, found = self.engine.tokenizer, []
            for number, prompt in enumerate(body.prompts()):
                text = isinstance(prompt, str)
                values = tokenizer.encode_text(cast(str, prompt)) if text else prompt
                name = f"prompt {number}"
                found.append(prompt_ids(name, values, tokenizer, self.engine.manifest))
            return found

        try:
            return await asyncio.to_thread(encode)
        except ConfigError as error:
            field = "messages" if isinstance(body, ChatBody) else "prompt"
            raise HttpError(400, str(error), field) from error


async def _gather(answers: Answers, choices: Sequence[Choice]) -> None:
    left = len(choices)
    while left:
        for index, tokens in _by_choice(await answers.take()).items():
            for token in tokens:
                choices[index].add(token)
            left -= tokens[-1].finish_reason is not None


def _by_choice(events: Sequence[tuple[int, Token | BaseException]]) -> dict[int, list[Token]]:
    """Tokens by choice; the first error is raised."""
    found: dict[int, list[Token]] = {}
    for index, given in events:
        if isinstance(given, BaseException):
            raise http_error(given) from given
        found.setdefault(index, []).append(given)
    return found


def http_error(error: BaseException) -> HttpError:
    """Return what a client is told of an error of the library."""
    if isinstance(error, UnknownAdapterError):
        return HttpError(404, str(error), "model")
    if isinstance(error, ConfigError):
        return HttpError(400, str(error))
    if isinstance(error, OutputError | AdapterError):
        return HttpError(500, str(error))
    if isinstance(error, StateError):
        return HttpError(503, str(error))
    return HttpError(500, "the engine has failed; its log says more")


def _top(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    return body.top_logprobs if body.logprobs else None
