"""Answers to prompts: whole, or one as text piece by piece."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trt_lora.plugins.errors import StateError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.sources import Source, source_array
from trt_lora.runtime.generation.text.prompts import Prompt, prompt_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import FinishReason, Logprobs, PromptLogprobs, Token
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.runtime.serving.serving_config import ServingConfig
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore


@short_repr
@dataclass(frozen=True)
class Completion:
    """An answer to one prompt."""

    token_ids: tuple[int, ...]  # without the stop token, and with all that a stop string is in
    text: str  # before a stop string; empty where the prompts were token ids
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # which of `stop_token_ids` or `stop` has ended it
    logprobs: tuple[Logprobs, ...] | None = None  # of each token, where asked for
    index: int = 0  # among the `n` answers to its prompt
    prompt_logprobs: PromptLogprobs | None = None  # of each token of it, where asked for


def answer_all(
    engine: Executor,
    adapters: AdapterStore,
    prompts: Sequence[Prompt],
    names: Sequence[str | None],
    sampling: Sequence[SamplingParams],
    tokenizer: TextTokenizer | None,
    sources: Sequence[Source | None] | None = None,
) -> list[Completion]:
    """Answer prompts, each with its own adapter and parameters; see `Engine.generate`."""
    ids = [
        prompt_ids(f"prompt {index}", prompt, tokenizer, engine.manifest)
        for index, prompt in enumerate(prompts)
    ]
    read = [
        source_array(f"prompt {index}", source, tokenizer, engine.manifest)
        for index, source in enumerate(sources or [None] * len(prompts))
    ]
    manifest = engine.manifest
    config = ServingConfig(
        rows=min(sum(params.n for params in sampling), manifest.max_batch_size),
        max_num_batched_tokens=manifest.max_input_len * manifest.max_batch_size,
    )
    scheduler = Scheduler(engine, adapters, config, tokenizer=tokenizer)
    answers = answer_on(scheduler, list(zip(ids, sampling, names, strict=True)), read)
    return [answer for several in answers for answer in several]


def stream_from(
    scheduler: Scheduler,
    prompt: Prompt,
    sampling: SamplingParams,
    *,
    adapter: Lease | str | None = None,
) -> Generator[str]:
    """Answer one prompt on a scheduler that answers nothing else, and yield its text as it comes.

    What the scheduler keeps of the prompts before is not run again.

    Raises:
        ConfigError, BackendError, UnknownAdapterError, AdapterError, StateError, OutputError: as
            `Engine.generate`.
    """
    number = scheduler.submit(prompt, sampling, adapter=adapter)
    try:
        while scheduler:
            for token in _next_tokens(scheduler):
                yield token.text
    finally:
        if number in scheduler:
            scheduler.cancel(number)


def answer_on(
    scheduler: Scheduler,
    prompts: Sequence[tuple[Sequence[int], SamplingParams, str | None]],
    sources: Sequence[Source | None] | None = None,
) -> list[list[Completion]]:
    """Answer prompts on a scheduler that answers nothing else.

    Args:
        scheduler: without requests; it has none afterwards, whatever has happened.
        prompts: token ids of each, its parameters and its adapter.
        sources: of each, on an encoder-decoder.

    Returns:
        The answers to every prompt.

    Raises:
        ConfigError, BackendError, UnknownAdapterError, AdapterError, StateError, OutputError: as
            `Engine.generate`.
    """
    try:
        numbers = [
            scheduler.submit_all(ids, params, adapter=name, source=source)
            for (ids, params, name), source in zip(
                prompts, sources or [None] * len(prompts), strict=True
            )
        ]
        answers: dict[int, list[Token]] = {number: [] for several in numbers for number in several}
        while scheduler:
            for token in _next_tokens(scheduler):
                answers[token.sequence_id].append(token)
    finally:
        with suppress(StateError):  # an interrupt has let go of all of them
            scheduler.clear()  # adapters are in use as long as their sequences
    return [
        [_completion(answers[number], index, params) for index, number in enumerate(several)]
        for (_, params, _), several in zip(prompts, numbers, strict=True)
    ]


def _next_tokens(scheduler: Scheduler) -> Iterable[Token]:
    """Return the tokens of a step; raise the first error of a request."""
    answers = scheduler.step()
    if scheduler.is_stalled:
        scheduler.sleep()
    for error in answers.failed.values():
        raise error
    return answers.tokens.values()


def _completion(tokens: Sequence[Token], index: int, sampling: SamplingParams) -> Completion:
    """Return an answer; its last token says why it ended."""
    given = [token for token in tokens if token.token_id is not None]
    ids = tuple(token.token_id for token in given if token.token_id is not None)
    known = tuple(token.logprobs for token in given if token.logprobs is not None)
    logprobs = None if sampling.listed_logprobs is None else known
    text, last = "".join(token.text for token in tokens), tokens[-1]
    assert last.finish_reason is not None  # a scheduler runs dry with all of its requests
    return Completion(
        ids, text, last.finish_reason, last.stop_reason, logprobs, index, tokens[0].prompt_logprobs
    )
