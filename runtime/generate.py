"""Generate answers with whichever adapter is active."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard, cast

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.chat_template import Message
from trt_lora.runtime.decoding import Decoder, Ids, left_pad
from trt_lora.runtime.executor import Engine
from trt_lora.runtime.manager import LoRAManager
from trt_lora.runtime.sampling import Sampling, choose
from trt_lora.runtime.tensors import TensorMap
from trt_lora.runtime.text import TextTokenizer

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Completion:
    """What one prompt was answered with."""

    token_ids: tuple[int, ...]  # without the stop token
    text: str  # empty where the prompts were token ids
    finish_reason: Literal["stop", "length"]


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    manager: LoRAManager | None = None,
    sampling: Sampling | None = None,
    tokenizer: TextTokenizer | None = None,
) -> list[Completion]:
    """Answer a batch of prompts, all with the manager's active adapter.

    Args:
        engine: a running engine.
        prompts: strings (a user's message each), conversations of messages, or lists of token ids.
        manager: holds the adapters; without one the base model answers.
        sampling: how tokens are chosen; greedy by default.
        tokenizer: of the engine's directory, to read it once for many calls.

    Returns:
        One completion per prompt, in their order.

    Raises:
        ConfigError: the batch or a prompt is beyond the engine's limits, or text is given and the
            engine has no tokenizer.
    """
    sampling = sampling or Sampling()
    if tokenizer is None and not all(_is_ids(prompt) for prompt in prompts):
        tokenizer = TextTokenizer(engine.directory)
    ids = [_encode(prompt, tokenizer) for prompt in prompts]
    _check_limits(ids, engine)
    rows = _run(engine, ids, _lora_bindings(engine, manager), sampling)
    return [
        Completion(row, tokenizer.decode(row) if tokenizer else "", reason) for row, reason in rows
    ]


def _is_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    return not isinstance(prompt, str) and all(isinstance(i, int | np.integer) for i in prompt)


def _encode(prompt: Prompt, tokenizer: TextTokenizer | None) -> list[int]:
    if _is_ids(prompt):
        return [int(token) for token in prompt]
    assert tokenizer is not None  # made when any prompt is text
    return tokenizer.encode(cast("str | Sequence[Message]", prompt))


def _check_limits(prompts: Sequence[Sequence[int]], engine: Engine) -> None:
    manifest = engine.manifest
    if len(prompts) > manifest.max_batch_size:
        raise ConfigError(
            f"{len(prompts)} prompts are more than this engine's batch of "
            f"{manifest.max_batch_size}; split them, or build with a larger --max-batch-size"
        )
    longest = max(map(len, prompts), default=0)
    if longest > manifest.max_input_len:
        raise ConfigError(
            f"a prompt has {longest} tokens, this engine takes {manifest.max_input_len}; "
            "shorten it, or build with a larger --max-input-len"
        )


def _lora_bindings(engine: Engine, manager: LoRAManager | None) -> TensorMap:
    if manager is None:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    return tensor_map


def _run(
    engine: Engine, prompts: Sequence[Sequence[int]], bindings: TensorMap, sampling: Sampling
) -> list[tuple[tuple[int, ...], Literal["stop", "length"]]]:
    base = engine.manifest.base_model
    stops = base.stop_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
    ids, mask = left_pad(prompts, base.pad_token_id)
    decoder = Decoder(engine, bindings, len(prompts))
    rng = np.random.default_rng(sampling.seed)
    rows: list[list[int]] = [[] for _ in prompts]
    running = np.ones(len(prompts), bool)
    steps = min(sampling.max_new_tokens, engine.manifest.max_seq_len - ids.shape[1])
    for _ in range(steps):
        tokens = choose(decoder.step(ids, mask)[:, -1], sampling, rng)
        running &= ~np.isin(tokens, stops)
        for row in np.flatnonzero(running):
            rows[row].append(int(tokens[row]))
        if not running.any():
            break
        ids, mask = _next_column(tokens, running, base.pad_token_id)
    return [(tuple(row), "length" if on else "stop") for row, on in zip(rows, running, strict=True)]


def _next_column(tokens: Ids, running: Ids, pad_token_id: int) -> tuple[Ids, Ids]:
    """Ids [batch, 1] and mask [batch, 1]; a sequence that has ended goes on as padding."""
    ids = np.where(running, tokens, pad_token_id)[:, None]
    return ids, running.astype(np.int64)[:, None]
