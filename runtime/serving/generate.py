"""Answers to prompts: whole, or one as text piece by piece."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.engines.engine import Engine
from trt_lora.runtime.generation.parameters.default_sampling import default_sampling
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams, sampling_of
from trt_lora.runtime.generation.text.prompts import (
    Prompt,
    is_text,
    one_each,
    prompt_ids,
    prompt_list,
)
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import FinishReason, Logprobs, PromptLogprobs, Token
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.serving.scheduler import Scheduler


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


@checked
def generate(
    engine: Engine,
    prompts: str | Iterable[Prompt],
    *,
    manager: LoRAManager | None = None,
    adapters: SlotAdapters | None = None,
    adapter_names: Sequence[str | None] | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    tokenizer: TextTokenizer | None = None,
) -> list[Completion]:
    """Answer prompts, all with the manager's active adapter, or each with its own.

    Any number of prompts and of adapters: what finds no row or slot waits for one. An answer
    depends on its own prompt, the adapter and `sampling` alone: the draws of a prompt come from the
    seed and its tokens, so that equal prompts with a seed have equal answers. What else is answered
    with it can change no more than the rounding of the logits; see `Scheduler`.

    Threads may generate on one engine, and with one tokenizer, at a time. Each has a manager of its
    own, or holds a lock from `switch_weights` until this returns.

    Args:
        engine: a running engine.
        prompts: one string, or a list of prompts: strings (a user's message each), conversations of
            messages, or lists of token ids.
        manager: holds the adapters; without one the base model answers.
        adapters: instead of `manager`, on an engine for many adapters: those of `adapter_names`.
        adapter_names: of each prompt, in their order; None is the base model.
        sampling: how tokens are chosen, for all prompts or one for each; what the model's
            generation_config.json says by default, and greedy where it says nothing; see
            `default_sampling`.
        tokenizer: of the engine's directory, to read it once for many calls.

    Returns:
        `sampling.n` completions per prompt, one by default, in the order of the prompts.

    Raises:
        ConfigError: a prompt is beyond the engine's limits, a prompt or stop token is none of the
            model's, text is given and the engine has no tokenizer, or there are not as many adapter
            names or sampling parameters as prompts; or what `sampling` asks for is refused.
        BackendError: structured output is asked for, and llguidance is not installed.
        UnknownAdapterError: no adapter of a name is loaded.
        AdapterError, StateError: an adapter cannot be read, or never have a slot.
        OutputError: the logits are NaN or infinite; the message names the adapter.
    """
    batch = prompt_list(prompts)
    params = _params(engine, batch, sampling)
    if tokenizer is None and (any(map(is_text, batch)) or any(p.needs_text for p in params)):
        tokenizer = TextTokenizer(engine.directory)
    names = [None] * len(batch)
    if adapter_names is not None:
        names = one_each("adapter_names", adapter_names, batch)
    ids = [
        prompt_ids(f"prompt {index}", prompt, tokenizer, engine.manifest)
        for index, prompt in enumerate(batch)
    ]
    scheduler = Scheduler(
        engine,
        adapters,
        manager=manager,
        rows=min(sum(p.n for p in params), engine.manifest.max_batch_size),
        max_num_batched_tokens=engine.manifest.max_input_len * engine.manifest.max_batch_size,
        tokenizer=tokenizer,
    )
    answers = _run(scheduler, zip(ids, params, names, strict=True))
    return [
        _completion(tokens, index, of_prompt)
        for of_prompt, several in zip(params, answers, strict=True)
        for index, tokens in enumerate(several)
    ]


@checked
def stream_text(
    engine: Engine,
    prompt: Prompt,
    *,
    manager: LoRAManager | None = None,
    adapters: SlotAdapters | None = None,
    adapter: Lease | str | None = None,
    sampling: SamplingParams | None = None,
    tokenizer: TextTokenizer | None = None,
) -> Generator[str]:
    """Answer one prompt and yield its text as it comes, together what `generate` returns.

    Bytes that are no whole character yet, and what may begin a stop string, are held back. Nothing
    runs before the first piece is asked for; closing the iterator ends the answer.

    Args:
        engine: a running engine with a tokenizer.
        prompt: as in `generate`.
        manager: as in `generate`.
        adapters: as in `generate`.
        adapter: instead of `adapter_names`: of this prompt.
        sampling: as in `generate`.
        tokenizer: as in `generate`.

    Raises:
        ConfigError: as `generate`; or `sampling` asks for more than text: n, or log probabilities.
        BackendError, UnknownAdapterError, AdapterError, StateError, OutputError: as `generate`.
    """
    tokenizer = tokenizer or TextTokenizer(engine.directory)
    (params,) = _params(engine, [prompt], sampling)
    if params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None:
        raise ConfigError(
            f"n is {params.n}, logprobs is {params.logprobs} and prompt_logprobs is "
            f"{params.prompt_logprobs}, but a stream is the text of one answer; call generate"
        )
    scheduler = Scheduler(engine, adapters, manager=manager, rows=1, tokenizer=tokenizer)
    yield from stream_from(scheduler, prompt, params, adapter=adapter)


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
            `generate`.
    """
    number = scheduler.submit(prompt, sampling, adapter=adapter)
    try:
        while scheduler:
            for token in _next_tokens(scheduler):
                yield token.text
    finally:
        if number in scheduler:
            scheduler.cancel(number)


def _params(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
) -> list[SamplingParams]:
    """The parameters of each prompt."""
    if sampling is None:
        sampling = default_sampling(engine.directory)
    is_single = isinstance(sampling, str) or not isinstance(sampling, Sequence)
    several = [sampling] * len(prompts) if is_single else one_each("sampling", sampling, prompts)
    return [sampling_of(given) for given in several]


def _run(
    scheduler: Scheduler, prompts: Iterable[tuple[Sequence[int], SamplingParams, str | None]]
) -> list[list[list[Token]]]:
    """What the steps made of every answer to every prompt with its adapter, in their order."""
    try:
        numbers = [scheduler.submit_all(ids, p, adapter=name) for ids, p, name in prompts]
        answers: dict[int, list[Token]] = {number: [] for several in numbers for number in several}
        while scheduler:
            for token in _next_tokens(scheduler):
                answers[token.row].append(token)
    finally:
        scheduler.clear()  # adapters are in use as long as their sequences
    return [[answers[number] for number in several] for several in numbers]


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
    logprobs = None if sampling.logprobs is None else known
    text, last = "".join(token.text for token in tokens), tokens[-1]
    assert last.finish_reason is not None  # a scheduler runs dry with all of its requests
    return Completion(
        ids, text, last.finish_reason, last.stop_reason, logprobs, index, tokens[0].prompt_logprobs
    )
