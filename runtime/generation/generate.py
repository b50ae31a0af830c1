"""Batched text generation with the active adapter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trt_lora.plugins.checked import checked
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.engines.engine import Engine
from trt_lora.runtime.generation.batch import Batch
from trt_lora.runtime.generation.parameters.default_sampling import default_sampling
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams, sampling_of
from trt_lora.runtime.generation.text.prompts import (
    Prompt,
    encoded,
    is_text,
    one_each,
    prompt_list,
)
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import FinishReason, Logprobs, Token
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters


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
    """Answer a batch of prompts, all with the manager's active adapter, or each with its own.

    An answer depends on its own prompt, the adapter and `sampling` alone: the draws of a prompt
    come from the seed and its tokens, so that equal prompts with a seed have equal answers. What
    else is in the batch can change no more than the rounding of the logits. On a GPU, the next step
    of greedy prompts is begun before the host looks at the last tokens; see `Batch` for what that
    guarantees.

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
        ConfigError: the batch or a prompt is beyond the engine's limits, a prompt or stop token is
            none of the model's, text is given and the engine has no tokenizer, or there are not
            as many adapter names or sampling parameters as prompts; or what `sampling` asks for is
            refused.
        BackendError: structured output is asked for, and llguidance is not installed.
        UnknownAdapterError: no adapter of a name is loaded.
        StateError: the prompts take more adapters than the engine has slots.
        OutputError: the logits are NaN or infinite; the message names the adapter.
    """
    batch = prompt_list(prompts)
    if sampling is None:
        sampling = default_sampling(engine.directory)
    is_single = isinstance(sampling, str) or not isinstance(sampling, Sequence)
    several = [sampling] * len(batch) if is_single else one_each("sampling", sampling, batch)
    params = [sampling_of(given) for given in several]
    if tokenizer is None and (any(map(is_text, batch)) or any(p.needs_text for p in params)):
        tokenizer = TextTokenizer(engine.directory)
    names = [None] * len(batch)
    if adapter_names is not None:
        names = one_each("adapter_names", adapter_names, batch)
    rows = sum(p.n for p in params)
    ids = encoded(batch, tokenizer, engine.manifest, rows)
    running = Batch(engine, manager=manager, adapters=adapters, rows=rows, tokenizer=tokenizer)
    answers = _run(running, zip(ids, params, names, strict=True))
    return [
        _completion(tokens, index, of_prompt)
        for of_prompt, several in zip(params, answers, strict=True)
        for index, tokens in enumerate(several)
    ]


def _run(
    batch: Batch, prompts: Iterable[tuple[Sequence[int], SamplingParams, str | None]]
) -> list[list[list[Token]]]:
    """What the steps made of every answer to every prompt with its adapter, in their order."""
    try:
        rows = [batch.add_all(ids, sampling, adapter=name) for ids, sampling, name in prompts]
        answers: dict[int, list[Token]] = {row: [] for several in rows for row in several}
        while batch:
            for token in batch.step():
                answers[token.row].append(token)
    finally:
        batch.clear()  # adapters are in use as long as their sequences
    return [[answers[row] for row in several] for several in rows]


def _completion(tokens: Sequence[Token], index: int, sampling: SamplingParams) -> Completion:
    """Return an answer; its last token says why it ended."""
    given = [token for token in tokens if token.token_id is not None]
    ids = tuple(token.token_id for token in given if token.token_id is not None)
    known = tuple(token.logprobs for token in given if token.logprobs is not None)
    logprobs = None if sampling.logprobs is None else known
    text, last = "".join(token.text for token in tokens), tokens[-1]
    assert last.finish_reason is not None  # a batch ends with all of its sequences
    return Completion(ids, text, last.finish_reason, last.stop_reason, logprobs, index)
