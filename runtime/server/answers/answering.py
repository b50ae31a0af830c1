"""Answer completions and chats: a body in, one JSON object or a stream of events out."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

import trt_lora
from trt_lora.plugins.checked import check_range
from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.server.adapters.served_models import ServedModels
from trt_lora.runtime.server.admission import Admission, Ticket
from trt_lora.runtime.server.answers.bodies import AnswerBody, ChatBody, CompletionBody
from trt_lora.runtime.server.answers.choices import Choice, usage
from trt_lora.runtime.server.answers.encoding import EncodedPrompt, encoded
from trt_lora.runtime.server.answers.replies import DONE, KEEP_ALIVE, Reply
from trt_lora.runtime.server.answers.running_answer import (
    AnswerStream,
    RunningAnswer,
    http_error,
    late,
)
from trt_lora.runtime.server.engine_process.engine_client import EngineClient
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.server.telemetry.metrics import ServerMetrics
from trt_lora.runtime.server.telemetry.request_record import LONGEST, RequestRecord

# Bytes of a body whose prompts take less time to encode than to hand to another thread and back;
# those of a long one take milliseconds, in which other answers would wait.
_SHORT = 2048


@dataclass(frozen=True)
class Model:
    """What the web's side knows of the base model."""

    manifest: Manifest  # `max_seq_len` may be less than the engine's
    tokenizer: TextTokenizer
    sampling: SamplingParams  # where a request does not say how

    @property
    def fingerprint(self) -> str:
        """What answers are made with, so that a client sees when that changes."""
        return f"trt-lora-{trt_lora.__version__}-{self.manifest.base_model.fingerprint[:8]}"


@dataclass(frozen=True)
class AnswerOptions:
    """What a server's flags say of all answers."""

    forces_usage: bool = False  # every stream tells how many tokens there were
    max_logprobs: int = 20  # beside each token, most; -1: all
    tokens_as_ids: bool = False  # tokens with log probabilities are called "token_id:7"
    tells_cached_tokens: bool = False  # usage counts the tokens of prompts that were not run
    shows_tokenizer: bool = False  # `/tokenizer_info` exists
    tells_times: bool = False  # of the only answer to a request
    stream_interval: int = 1  # tokens that an event of a stream has, least
    keep_alive_s: float | None = None  # between comments of a stream that has nothing to say

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning.

        Raises:
            ConfigError: there is one.
        """
        check_range("--max-logprobs", self.max_logprobs, -1)
        check_range("--stream-interval", self.stream_interval, 1)
        check_range("--sse-keep-alive-interval", self.keep_alive_s, 0)


@dataclass
class Answering:
    """What answers take: the engine, the names of models, and who is admitted."""

    client: EngineClient
    model: Model
    models: ServedModels
    admission: Admission
    metrics: ServerMetrics
    options: AnswerOptions

    async def answer(self, body: CompletionBody | ChatBody, record: RequestRecord) -> Response:
        """Return the response to a request, of which a record tells.

        Raises:
            HttpError: it is refused.
        """
        start = time.perf_counter()
        record.body_s = start - record.start
        record.operation = "chat" if isinstance(body, ChatBody) else "text_completion"
        record.model = (body.model or self.models.base[0])[:LONGEST]
        adapter, blend = self._adapter(body)
        record.adapters = list(blend) or [*filter(None, [adapter])]
        field = "lora" if blend else "model"
        sampling = body.sampling(self.model.sampling, self.options.max_logprobs)
        record.sampling = sampling
        tokenizer, manifest = self.model.tokenizer, self.model.manifest
        if record.body_bytes <= _SHORT:
            prompts = encoded(tokenizer, manifest, body)
        else:
            prompts = await asyncio.to_thread(encoded, tokenizer, manifest, body)
        tokens = sum(len(prompt.ids) for prompt in prompts) * sampling.n
        most = self._max_tokens(sampling, prompts)
        ticket = self.admission.admit(len(prompts) * sampling.n, tokens, record.client)
        try:
            await self._ready(record.adapters, ticket)
            # Not `wait_for`, which before Python 3.12 loses a cancellation as its result comes.
            async with asyncio.timeout(ticket.seconds_left):
                answers = await self.client.submit(
                    [prompt.ids for prompt in prompts],
                    most,
                    sampling,
                    adapter=adapter,
                    blend=blend,
                    client=record.client,
                    salt=body.cache_salt,
                )
        except BaseException as error:
            ticket.close()
            if isinstance(error, TimeoutError):
                raise late("the engine to take it") from error
            if isinstance(error, LoRAError):
                raise http_error(error, field) from error
            raise
        pairs = zip(prompts, most, strict=True)
        choices = [Choice(p, m) for p, m in pairs for _ in range(sampling.n)]
        running = RunningAnswer(
            answers,
            ticket,
            choices,
            self.metrics,
            field=field,
            start=start,
            record=record,
            interval=max(body.stream_interval or 1, self.options.stream_interval),
        )
        reply = Reply(
            tokenizer,
            body.model or self.models.base[0],
            body,
            request_id=body.request_id or record.id,
            tokens_as_ids=self.options.tokens_as_ids,
            fingerprint=self.model.fingerprint,
        )
        record.id = reply.id
        if body.stream:
            return AnswerStream(self._stream(body, running, reply, record), running)
        try:
            while not running.is_over:
                await running.take()
        finally:
            running.close()
        told = reply.whole(choices, self._usage(choices), **self._times(choices))
        return Response(told, media_type="application/json")

    async def _stream(
        self, body: AnswerBody, running: RunningAnswer, reply: Reply, record: RequestRecord
    ) -> AsyncIterator[bytes]:
        asked, choices = body.stream_options, running.choices
        forces = self.options.forces_usage
        counts = forces or bool(asked and asked.include_usage)
        always = counts and (forces or bool(asked and asked.continuous_usage_stats))
        try:
            for chunk in reply.first(choices, usage(choices[:1]) if always else None):
                yield chunk
            while not running.is_over:
                found = await running.take(self.options.keep_alive_s)
                if not found and self.options.keep_alive_s is not None:
                    yield KEEP_ALIVE
                for index, tokens in found.items():
                    choice = choices[index]
                    counted = usage([choice]) if always else None
                    is_end = tokens[-1].finish_reason is not None and not counts
                    yield reply.chunk(index, choice, tokens, counted, is_end=is_end)
            if counts:
                yield reply.last(self._usage(choices), **self._times(choices))
        except HttpError as error:
            record.refused(error)
            yield b"data: " + error.body() + b"\n\n"
        yield DONE

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return usage(choices, details=self.options.tells_cached_tokens)

    def _times(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Those of a request that is one answer, where they are to be told."""
        is_told = self.options.tells_times and len(choices) == 1
        return {"metrics": choices[0].told_times()} if is_told else {}

    def _adapter(self, body: AnswerBody) -> tuple[str | None, dict[str, float]]:
        """The adapter that a request means by name, or the parts of a blend."""
        name = self.models.adapter(body.model)
        for other in body.named_adapters():
            found = self.models.adapter(other)
            if name not in (None, found):
                raise HttpError(400, f"model is {name!r}, and the body asks for {found!r}", "model")
            name = found
        if body.lora is None:
            return name, {}
        if name is not None:
            raise HttpError(400, f"lora is given, and model is {name!r}; expected a base", "lora")
        parts: dict[str, float] = {}
        for part in body.parts():
            try:
                adapter = self.models.adapter(part.name)
            except HttpError as error:
                text = f"lora has {part.name!r:.200}, and no adapter has that name"
                raise HttpError(400, text, "lora") from error
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
                async with asyncio.timeout(ticket.seconds_left):
                    await offers.ready(adapters)
        except TimeoutError as error:
            raise late("its adapter to be read") from error

    def _max_tokens(self, sampling: SamplingParams, prompts: Sequence[EncodedPrompt]) -> list[int]:
        """How long the answers to each prompt may be: they end where `--max-model-len` does."""
        rooms = [self.model.manifest.max_seq_len - len(prompt.ids) for prompt in prompts]
        return [max(min(sampling.max_tokens or room, room), 1) for room in rooms]
