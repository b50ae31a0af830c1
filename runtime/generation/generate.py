"""Batched text generation with the active adapter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trt_lora.runtime.engines.engine import Engine
from trt_lora.runtime.generation.batch import Batch, FinishReason
from trt_lora.runtime.generation.sampling import SamplingParams
from trt_lora.runtime.generation.text.prompts import Prompt, encoded, is_text, prompt_list
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.managers.lora_manager import LoRAManager


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
    sampling: SamplingParams | None = None,
    tokenizer: TextTokenizer | None = None,
) -> list[Completion]:
    """Answer a batch of prompts, all with the manager's active adapter.

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
        sampling: how tokens are chosen; greedy by default.
        tokenizer: of the engine's directory, to read it once for many calls.

    Returns:
        One completion per prompt, in their order.

    Raises:
        ConfigError: the batch or a prompt is beyond the engine's limits, a prompt or stop token is
            none of the model's, or text is given and the engine has no tokenizer.
        OutputError: the logits are NaN or infinite; the message names the adapter.
    """
    sampling = sampling or SamplingParams()
    batch = prompt_list(prompts)
    if tokenizer is None and any(map(is_text, batch)):
        tokenizer = TextTokenizer(engine.directory)
    rows = _run(engine, encoded(batch, tokenizer, engine.manifest), manager, sampling)
    return [
        Completion(row, tokenizer.decode(row) if tokenizer else "", reason) for row, reason in rows
    ]


def _run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    manager: LoRAManager | None,
    sampling: SamplingParams,
) -> list[tuple[tuple[int, ...], FinishReason]]:
    """Token ids and finish reason of every prompt, in their order."""
    batch = Batch(engine, manager=manager, rows=len(prompts))
    for prompt in prompts:
        batch.add(prompt, sampling)
    rows: list[list[int]] = [[] for _ in prompts]
    reasons: list[FinishReason] = ["length" for _ in prompts]
    while batch:
        for token in batch.step():
            if token.token_id is not None:
                rows[token.row].append(token.token_id)
            if token.finish_reason is not None:
                reasons[token.row] = token.finish_reason
    return [(tuple(row), reason) for row, reason in zip(rows, reasons, strict=True)]
