"""Prompt encoding and validation against the engine's limits."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text.chat_template import Message
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import STATIC, Manifest

Prompt = str | Sequence[int] | Sequence[Message]

_KINDS = "expected a string, a list of messages or a list of token ids"


def prompt_list(prompts: object) -> list[Prompt]:
    """Return the prompts of a batch; a bare string is one.

    Raises:
        ConfigError: there is none, or one is nothing that can be answered.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts is {prompts!r:.80}; pass a string, or a list of prompts")
    batch = list(prompts)
    if not batch:
        raise ConfigError("there is no prompt; a batch has at least one")
    for index, prompt in enumerate(batch):
        if isinstance(prompt, Mapping | bytes) or not isinstance(prompt, Sequence | np.ndarray):
            raise ConfigError(
                f"prompt {index} is {prompt!r:.80}, {_KINDS}; a single one goes into a list too"
            )
    return batch


def is_text(prompt: Prompt) -> bool:
    """Return whether a prompt needs a tokenizer: a string or messages."""
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))


def encoded(
    prompts: Sequence[Prompt], tokenizer: TextTokenizer | None, manifest: Manifest, n: int = 1
) -> list[list[int]]:
    """Return the token ids of every prompt.

    Args:
        prompts: as `prompt_list` returns them.
        tokenizer: needed where one is text.
        manifest: of the engine that is to answer.
        n: answers to each.

    Raises:
        ConfigError: there are more prompts, or longer ones, than the engine takes; one is empty,
            or holds what is no token id of the model.
    """
    if len(prompts) * n > manifest.max_batch_size:
        answers = f", {n} answers each," if n > 1 else ""
        raise ConfigError(
            f"{len(prompts)} prompts{answers} are more than this engine's batch of "
            f"{manifest.max_batch_size}; split them, or build with a larger --max-batch-size"
        )
    ids = []
    for index, prompt in enumerate(prompts):
        values = prompt
        if is_text(prompt):
            assert tokenizer is not None  # made when any prompt is text
            values = tokenizer.encode(cast("str | Sequence[Message]", prompt))
        ids.append(check_prompt(f"prompt {index}", values, manifest))
    return ids


def check_prompt(name: str, values: object, manifest: Manifest) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        ConfigError: it is empty, longer than the engine takes, or holds what is no token id of
            the model; the message begins with `name`.
    """
    ids = list(token_ids(name, values, manifest.vocabulary_size))
    if not ids:
        raise ConfigError(f"{name} is empty; it needs at least one token")
    if len(ids) > manifest.longest_prompt:
        option = "--max-seq-len" if manifest.kv_cache == STATIC else "--max-input-len"
        raise ConfigError(
            f"{name} has {len(ids)} tokens, this engine takes {manifest.longest_prompt}; "
            f"shorten it, or build with a larger {option}"
        )
    return ids
