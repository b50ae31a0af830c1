"""Answer completions and chats: a body in, one JSON object or a stream of events out."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import cast

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from trt_lora.plugins.errors import (
    AdapterError,
    BackendError,
    ConfigError,
    LoRAError,
    OutputError,
    StateError,
    UnknownAdapterError,
)
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.chat_template import Chat
from trt_lora.runtime.generation.text.prompts import Prompt, prompt_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.adapters.served_models import ServedModels
from trt_lora.runtime.server.admission import Admission, Ticket
from trt_lora.runtime.server.answers.bodies import AnswerBody, ChatBody, CompletionBody, named_field
from trt_lora.runtime.server.answers.replies import DONE, KEEP_ALIVE, Choice, Reply, usage
from trt_lora.runtime.server.engine_process.engine_client import Answers, EngineClient
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.telemetry.metrics import ServerMetrics


@dataclass(frozen=True)
class Model:
    """What the web's side knows of the base model."""

    manifest: Manifest  # `max_seq_len` may be less than the engine's
    tokenizer: TextTokenizer
    sampling: SamplingParams  # where a request does not say how


@dataclass(frozen=True)
class AnswerOptions:
    """What a server's flags say of all answers."""

    forces_usage: bool = False  # every stream tells how many tokens there were
    max_logprobs: int = 20  # beside each token, most
    tokens_as_ids: bool = False  # tokens with log probabilities are called "token_id:7"
    keep_alive_s: float | None = None  # between comments of a stream that has nothing to say


class RunningAnswer:
    """The answers to one HTTP request on their way; it is closed however they end."""

    def __init__(
        self,
        answers: Answers,
        ticket: Ticket,
        choices: list[Choice],
        metrics: ServerMetrics,
        *,
        field: str,
    ) -> None:
        """Begin without tokens; `field` of the body names the adapter."""
        self.choices, self._left = choices, len(choices)
        self._answers, self._ticket, self._metrics = answers, ticket, metrics
        self._held: list[list[Token]] = [[] for _ in choices]  # of each, without text so far
        self._field = field
        self._start = self._last = time.perf_counter()

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return not self._left

    async def take(self, within_s: float | None = None) -> dict[int, list[Token]]:
        """Wait for tokens, and return them by choice; those without text come with the next.

        Args:
            within_s: return nothing after so many seconds.

        Raises:
            HttpError: a request has failed, or has waited too long for its first token.
        """
        found: dict[int, list[Token]] = {}
        for index, given in await self._events(within_s):
            if isinstance(given, LoRAError):
                raise http_error(given, self._field) from given
            self._note(given)
            self.choices[index].add(given)
            self._left -= given.finish_reason is not None
            self._held[index].append(given)
            if given.text or given.finish_reason is not None:
                found[index] = found.get(index, []) + self._held[index]
                self._held[index] = []
        return found

    def close(self) -> None:
        """Cancel what has not ended."""
        reason = "abort" if self._left else self.choices[0].tokens[-1].finish_reason
        if self._ticket.is_open:
            made = sum(len(choice.tokens) for choice in self.choices)
            self._metrics.ended(str(reason), time.perf_counter() - self._start, made)
        self._answers.close()
        self._ticket.close()

    async def _events(self, within_s: float | None) -> list[tuple[int, Token | LoRAError]]:
        left = self._ticket.seconds_left
        if left is None and within_s is None:
            return await self._answers.take()
        bound = min(bound for bound in (left, within_s) if bound is not None)
        try:
            return await asyncio.wait_for(self._answers.take(), bound)
        except TimeoutError as error:
            if left is None or left > bound:
                return []
            raise _late(await self._answers.waits_for()) from error

    def _note(self, token: Token) -> None:
        now = time.perf_counter()
        if self._ticket.seconds_left is not None:
            self._ticket.begin()
            prompts = {id(c.prompt_tokens): len(c.prompt_tokens) for c in self.choices}
            self._metrics.first_token(now - self._start, sum(prompts.values()))
        elif len(self.choices) == 1:
            self._metrics.next_token(now - self._last)
        self._last = now


class AnswerStream(StreamingResponse):
    """A stream whose requests end with it, also where no chunk was ever asked for."""

    def __init__(self, chunks: AsyncIterator[bytes], running: RunningAnswer) -> None:
        """Take the chunks, and what they come from."""
        super().__init__(chunks, media_type="text/event-stream")
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.close()


@dataclass
class Answering:
    """What answers take: the engine, the names of models, and who is admitted."""

    client: EngineClient
    model: Model
    models: ServedModels
    admission: Admission
    metrics: ServerMetrics
    options: AnswerOptions

    async def answer(
        self, body: CompletionBody | ChatBody, *, request_id: str | None, client: str | None
    ) -> Response:
        """Return the response to a request.

        Raises:
            HttpError: it is refused.
        """
        adapter, blend = self._adapter(body)
        field = "lora" if blend else "model"
        sampling = body.sampling(self.model.sampling, self.options.max_logprobs)
        prompts = await self._encoded(body)
        tokens = sum(map(len, prompts)) * sampling.n
        ticket = self.admission.admit(len(prompts) * sampling.n, tokens, client)
        try:
            await self._ready(list(blend) or [*filter(None, [adapter])], ticket)
            submitting = self.client.submit(
                prompts,
                self._max_tokens(sampling, prompts),
                sampling,
                adapter=adapter,
                blend=blend,
                client=client,
                salt=body.cache_salt,
            )
            answers = await asyncio.wait_for(submitting, ticket.seconds_left)
        except BaseException as error:
            ticket.close()
            if isinstance(error, TimeoutError):
                raise _late("the engine to take it") from error
            if isinstance(error, LoRAError):
                raise http_error(error, field) from error
            raise
        choices = [Choice(prompt) for prompt in prompts for _ in range(sampling.n)]
        running = RunningAnswer(answers, ticket, choices, self.metrics, field=field)
        reply = Reply(
            self.model.tokenizer,
            body.model or self.models.base[0],
            body,
            request_id=body.request_id or request_id,
            tokens_as_ids=self.options.tokens_as_ids,
        )
        if body.stream:
            return AnswerStream(self._stream(body, running, reply), running)
        try:
            while not running.is_over:
                await running.take()
        finally:
            running.close()
        return Response(reply.whole(choices), media_type="application/json")

    async def _stream(
        self, body: AnswerBody, running: RunningAnswer, reply: Reply
    ) -> AsyncIterator[bytes]:
        asked, choices = body.stream_options, running.choices
        forces = self.options.forces_usage
        counts = forces or bool(asked and asked.include_usage)
        always = counts and (forces or bool(asked and asked.continuous_usage_stats))
        try:
            for chunk in reply.first(choices, usage(choices) if always else None):
                yield chunk
            while not running.is_over:
                found = await running.take(self.options.keep_alive_s)
                if not found and self.options.keep_alive_s is not None:
                    yield KEEP_ALIVE
                for index, tokens in found.items():
                    counted = usage(choices) if always else None
                    yield reply.chunk(index, choices[index], tokens, counted)
            if counts:
                yield reply.last(usage(choices))
        except HttpError as error:
            yield b"data: " + error.body() + b"\n\n"
        yield DONE

    def _adapter(self, body: AnswerBody) -> tuple[str | None, dict[str, float]]:
        """The adapter that a request means by name, or the parts of a blend."""
        name = self.models.adapter(body.model)
        asked = body.lora_request.lora_name if body.lora_request else None
        for other in filter(None, (body.lora_path, asked)):
            found = self.models.adapter(other)
            if name not in (None, found):
                raise HttpError(400, f"model is {name!r}, and the body asks for {found!r}", "model")
            name = found
        if body.lora is None:
            return name, {}
        if name is not None:
            raise HttpError(400, f"lora is given, and model is {name!r}; expected a base", "lora")
        parts: dict[str, float] = {}
        for part in body.lora:
            adapter = self.models.adapter(part.name)
            if adapter is None or adapter in parts:
                raise HttpError(
                    400, f"lora has {part.name!r}: it is there twice, or a base", "lora"
                )
            parts[adapter] = part.scale
        return None, parts

    async def _ready(self, adapters: Sequence[str], ticket: Ticket) -> None:
        """Let those that are used for the first time be read."""
        offers = self.models.offers
        try:
            if not offers.are_read(adapters):
                await asyncio.wait_for(offers.ready(adapters), ticket.seconds_left)
        except TimeoutError as error:
            raise _late("its adapter to be read") from error

    async def _encoded(self, body: CompletionBody | ChatBody) -> list[list[int]]:
        """The prompts as token ids, made in another thread: a long one takes milliseconds."""

        def encode() -> list[list[int]]:
            tokenizer, manifest = self.model.tokenizer, self.model.manifest
            most = body.truncate_prompt_tokens
            found = []
            for number, prompt in enumerate(body.prompts()):
                values: Prompt = prompt
                if isinstance(prompt, str):
                    special = body.add_special_tokens is not False
                    values = tokenizer.encode_text(prompt, special_tokens=special)
                elif isinstance(prompt, Chat):
                    values = tokenizer.encode(prompt)
                if most is not None:
                    ids = cast("list[int]", values)
                    values = ids[:most] if body.truncation_side == "right" else ids[-most:]
                found.append(prompt_ids(f"prompt {number}", values, tokenizer, manifest))
            return found

        try:
            return await asyncio.to_thread(encode)
        except ConfigError as error:
            field = "messages" if isinstance(body, ChatBody) else "prompt"
            raise HttpError(400, str(error), field) from error

    def _max_tokens(self, sampling: SamplingParams, prompts: Sequence[Sequence[int]]) -> list[int]:
        """How long the answers to each prompt may be: they end where `--max-model-len` does."""
        rooms = [self.model.manifest.max_seq_len - len(prompt) for prompt in prompts]
        return [max(min(sampling.max_tokens or room, room), 1) for room in rooms]


def _late(what: str) -> HttpError:
    text = f"no token came in time: the request waited for {what}"
    return HttpError(503, text, retry_after_s=1)


def http_error(error: BaseException, field: str | None = None) -> HttpError:
    """Return what a client is told of an error of the library; `field` names an adapter."""
    if isinstance(error, UnknownAdapterError):
        return HttpError(404, str(error), field)
    if isinstance(error, ConfigError):
        return HttpError(400, str(error), named_field(str(error)))
    if isinstance(error, AdapterError):
        # Of a blend it is the scale; of a model its files, which are not what they were.
        return HttpError({"lora": 400, "model": 409}.get(field or "", 500), str(error), field)
    if isinstance(error, OutputError):
        return HttpError(500, str(error))
    if isinstance(error, StateError | BackendError):
        return HttpError(503, str(error))
    return HttpError(500, "the engine has failed; its log says more")
