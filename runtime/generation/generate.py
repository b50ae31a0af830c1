"""Batched text generation with the active adapter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trt_lora.plugins.errors import OutputError
from trt_lora.runtime.engines.engine import Engine
from trt_lora.runtime.generation.decoder import Decoder
from trt_lora.runtime.generation.prompts import Prompt, encoded, is_text, prompt_list
from trt_lora.runtime.generation.sampling import Logits, SamplingParams, choose, generator
from trt_lora.runtime.generation.step_inputs import Ids, left_pad, vocabulary_size
from trt_lora.runtime.generation.token_ids import token_ids
from trt_lora.runtime.generation.tokenizer import TextTokenizer
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.memory.tensor import TensorMap

FinishReason = Literal["stop", "length"]


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
    batch can change no more than the rounding of the logits.

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
    stops, pad = _stop_token_ids(engine, sampling), engine.manifest.base_model.pad_token_id
    bindings, weights = _weights(engine, manager)
    ids, mask = left_pad(prompts, pad)
    decoder = Decoder(engine, bindings, len(prompts))
    generators = [generator(sampling.seed, prompt) for prompt in prompts]
    rows: list[list[int]] = [[] for _ in prompts]
    running = np.arange(len(prompts))  # rows that have met no stop token
    steps = min(sampling.max_new_tokens, engine.manifest.max_seq_len - ids.shape[1])
    for _ in range(steps):
        logits = decoder.step(ids, mask)[:, -1]
        if running.size < len(prompts):
            logits = logits[running]  # a copy: padding may be no number
        _check_numbers(logits, running, weights)
        draws = np.array([generators[row].random() for row in running])
        tokens = choose(logits, [sampling] * len(draws), draws)
        going_on = ~np.isin(tokens, stops)
        running, tokens = running[going_on], tokens[going_on]
        for row, token in zip(running, tokens, strict=True):
            rows[row].append(int(token))
        if not running.size:
            break
        ids, mask = _next_column(tokens, running, len(prompts), pad)
    cut = set(running.tolist())
    return [(tuple(row), "length" if i in cut else "stop") for i, row in enumerate(rows)]


def _stop_token_ids(engine: Engine, sampling: SamplingParams) -> tuple[int, ...]:
    if sampling.stop_token_ids is None:
        return engine.manifest.base_model.stop_token_ids
    vocabulary = vocabulary_size(engine.manifest)
    return token_ids("stop_token_ids", sampling.stop_token_ids, vocabulary)


def _weights(engine: Engine, manager: LoRAManager | None) -> tuple[TensorMap, str]:
    """The LoRA bindings, and in words what is bound."""
    if manager is None:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    name = manager.get_active_adapter_name()
    strength = f"adapter {name!r} at strength {manager.active_scale:g}"
    return tensor_map, strength if name else "no adapter"


def _check_numbers(logits: Logits, rows: npt.NDArray[np.int64], weights: str) -> None:
    """Refuse NaN and infinity: either shows in the maximum or the minimum."""
    finite = np.isfinite(logits.max(axis=-1)) & np.isfinite(logits.min(axis=-1))
    if not finite.all():
        wrong = ", ".join(map(str, rows[~finite]))
        raise OutputError(
            f"the logits of prompt {wrong} are NaN or infinite with {weights}: a value left the "
            "engine's number range; use a lower strength, or build with --dtype float32 or bfloat16"
        )


def _next_column(
    tokens: Ids, running: npt.NDArray[np.int64], batch_size: int, pad_token_id: int
) -> tuple[Ids, Ids]:
    """Ids [batch, 1] and mask [batch, 1]; a sequence that has ended goes on as padding."""
    ids = np.full((batch_size, 1), pad_token_id, np.int64)
    mask = np.zeros_like(ids)
    ids[running, 0], mask[running, 0] = tokens, 1
    return ids, mask
