"""Batched text generation with the active adapter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.engines.engine import Engine
from trt_lora.runtime.generation.batch import Batch
from trt_lora.runtime.generation.parameters.default_sampling import default_sampling
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.answer_text import before_stop
from trt_lora.runtime.generation.text.prompts import Prompt, encoded, is_text, prompt_list
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
    logprobs: tuple[Logprobs, ...] | None = None  # of each token, where asked for
    index: int = 0  # among the `n` answers to its prompt


def generate(
    engine: Engine,
    prompts: str | Iterable[Prompt],
    *,
    manager: LoRAManager | None = None,
    adapters: SlotAdapters | None = None,
    adapter_names: Sequence[str | None] | None = None,
    sampling: SamplingParams | None = None,
    tokenizer: TextTokenizer | None = None,
) -> list[Completion]:
    """Answer a batch of prompts, all with the manager's active adapter, or each with its own.

    An answer depends on its own prompt, the adapter and `sampling` alone: the draws of a prompt
    come from the seed and its tokens, so that equal prompts have equal answers. What else is in the
    batch can change no more than the rounding of the logits. On a GPU, the next step of greedy
    prompts is begun before the host looks at the last tokens; see `Batch` for what that guarantees.

    Threads may generate on one engine, and with one tokenizer, at a time. Each has a manager of its
    own, or holds a lock from `switch_weights` until this returns.

    Args:
        engine: a running engine.
        prompts: one string, or a list of prompts: strings (a user's message each), conversations of
            messages, or lists of token ids.
        manager: holds the adapters; without one the base model answers.
        adapters: instead of `manager`, on an engine for many adapters: those of `adapter_names`.
        adapter_names: of each prompt, in their order; None is the base model.
        sampling: how tokens are chosen; what the model's generation_config.json says by default,
            and greedy where it says nothing; see `default_sampling`.
        tokenizer: of the engine's directory, to read it once for many calls.

    Returns:
        `sampling.n` completions per prompt, one by default, in the order of the prompts.

    Raises:
        ConfigError: the batch or a prompt is beyond the engine's limits, a prompt or stop token is
            none of the model's, text is given and the engine has no tokenizer, or there are not
            as many adapter names as prompts; or what `sampling` asks for is refused.
        BackendError: structured output is asked for, and llguidance is not installed.
        UnknownAdapterError: no adapter of a name is loaded.
        StateError: the prompts take more adapters than the engine has slots.
        OutputError: the logits are NaN or infinite; the message names the adapter.
    """
    batch = prompt_list(prompts)
    sampling = default_sampling(engine.directory) if sampling is None else sampling
    if tokenizer is None and (sampling.needs_text or any(map(is_text, batch))):
        tokenizer = TextTokenizer(engine.directory)
    if isinstance(adapter_names, str):
        raise ConfigError(
            f"adapter_names is the string {adapter_names!r}; give a list of one name for each "
            f"prompt: [{adapter_names!r}]"
        )
    names = [None] * len(batch) if adapter_names is None else list(adapter_names)
    if len(names) != len(batch):
        raise ConfigError(
            f"there are {len(names)} adapter_names for {len(batch)} prompts; give one for each, "
            "None for the base model"
        )
    ids = encoded(batch, tokenizer, engine.manifest, sampling.n)
    running = Batch(
        engine,
        manager=manager,
        adapters=adapters,
        rows=len(batch) * sampling.n,
        tokenizer=tokenizer if sampling.needs_text else None,
    )
    answers = _run(running, zip(ids, names, strict=True), sampling)
    return [
        _completion(tokens, index, sampling, tokenizer)
        for index, tokens in (pair for several in answers for pair in enumerate(several))
    ]


def _run(
    batch: Batch, prompts: Iterable[tuple[Sequence[int], str | None]], sampling: SamplingParams
) -> list[list[list[Token]]]:
    """What the steps made of every answer to every prompt with its adapter, in their order."""
    try:
        rows = [batch.add_all(ids, sampling, adapter=name) for ids, name in prompts]
        answers: dict[int, list[Token]] = {row: [] for several in rows for row in several}
        while batch:
            for token in batch.step():
                answers[token.row].append(token)
    finally:
        batch.clear()  # adapters are in use as long as their sequences
    return [[answers[row] for row in several] for several in rows]


def _completion(
    tokens: Sequence[Token], index: int, sampling: SamplingParams, tokenizer: TextTokenizer | None
) -> Completion:
    """Return an answer; its last token says why it ended."""
    given = [token for token in tokens if token.token_id is not None]
    ids = tuple(token.token_id for token in given if token.token_id is not None)
    text = before_stop(tokenizer.decode(ids), sampling.stop_strings) if tokenizer else ""
    known = tuple(token.logprobs for token in given if token.logprobs is not None)
    logprobs = None if sampling.logprobs is None else known
    reason = tokens[-1].finish_reason
    assert reason is not None  # a batch ends with all of its sequences
    return Completion(ids, text, reason, logprobs, index)
