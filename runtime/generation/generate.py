"""Batched text generation with the active adapter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.engines.engine import Engine
from trt_lora.runtime.generation.batch import Batch, FinishReason
from trt_lora.runtime.generation.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.prompts import Prompt, encoded, is_text, prompt_list
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt."""

    token_ids: tuple[int, ...]  # without the stop token
    text: str  # empty where the prompts were token ids
    finish_reason: FinishReason


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
        sampling: how tokens are chosen; greedy by default.
        tokenizer: of the engine's directory, to read it once for many calls.

    Returns:
        One completion per prompt, in their order.

    Raises:
        ConfigError: the batch or a prompt is beyond the engine's limits, a prompt or stop token is
            none of the model's, text is given and the engine has no tokenizer, or there are not
            as many adapter names as prompts.
        UnknownAdapterError: no adapter of a name is loaded.
        StateError: the prompts take more adapters than the engine has slots.
        OutputError: the logits are NaN or infinite; the message names the adapter.
    """
    sampling = sampling or SamplingParams()
    batch = prompt_list(prompts)
    if tokenizer is None and any(map(is_text, batch)):
        tokenizer = TextTokenizer(engine.directory)
    names = [None] * len(batch) if adapter_names is None else list(adapter_names)
    if len(names) != len(batch):
        raise ConfigError(
            f"there are {len(names)} adapter_names for {len(batch)} prompts; give one for each, "
            "None for the base model"
        )
    ids = encoded(batch, tokenizer, engine.manifest)
    running = Batch(engine, manager=manager, adapters=adapters, rows=len(batch))
    rows = _run(running, zip(ids, names, strict=True), sampling)
    return [
        Completion(row, tokenizer.decode(row) if tokenizer else "", reason) for row, reason in rows
    ]


def _run(
    batch: Batch, prompts: Iterable[tuple[Sequence[int], str | None]], sampling: SamplingParams
) -> list[tuple[tuple[int, ...], FinishReason]]:
    """Token ids and finish reason of every prompt and its adapter, in their order."""
    try:
        for ids, name in prompts:
            batch.add(ids, sampling, adapter=name)
        rows: list[list[int]] = [[] for _ in range(len(batch))]
        reasons: list[FinishReason] = ["length" for _ in rows]
        while batch:
            for token in batch.step():
                if token.token_id is not None:
                    rows[token.row].append(token.token_id)
                if token.finish_reason is not None:
                    reasons[token.row] = token.finish_reason
    finally:
        batch.clear()  # adapters are in use as long as their sequences
    return [(tuple(row), reason) for row, reason in zip(rows, reasons, strict=True)]
