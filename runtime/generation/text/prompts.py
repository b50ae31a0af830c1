"""Prompt encoding and validation against the engine's limits."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, cast

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text.chat_template import Chat, Message
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import Manifest

Prompt = str | Sequence[int] | Sequence[Message] | Chat

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
        is_one = isinstance(prompt, Sequence | np.ndarray | Chat)
        if isinstance(prompt, Mapping | bytes) or not is_one:
            raise ConfigError(
                f"prompt {index} is {prompt!r:.80}, {_KINDS}; a single one goes into a list too"
            )
    return batch


def is_text(prompt: Prompt) -> bool:
    """Return whether a prompt needs a tokenizer: a string or messages."""
    if isinstance(prompt, str | Chat):
        return True
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def one_each(label: str, values: Any, prompts: Sequence[object], of: str = "prompt") -> list[Any]:
    """Return what belongs to each of some prompts or others, in their order.

    Raises:
        ConfigError: it is no list, or has not as many items as there are prompts; the message
            begins with `label`.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ConfigError(
            f"{label} is {values!r:.80}; give a list with one for each {of}: [{values!r:.80}]"
        )
    if len(values) != len(prompts):
        raise ConfigError(
            f"there are {len(values)} {label} for {len(prompts)} {of}s; give one for each"
        )
    return list(values)


def prompt_ids(
    name: str, prompt: Prompt, tokenizer: TextTokenizer | None, manifest: Manifest
) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        ConfigError: it is text and there is no tokenizer; it is empty, longer than the engine
            takes, or holds what is no token id of the model. The message begins with `name`.
    """
    values: object = prompt
    if is_text(prompt):
        if tokenizer is None:
            raise ConfigError(
                f"{name} is text, and there is no tokenizer; pass tokens, or "
                "tokenizer=TextTokenizer(engine.directory)"
            )
        values = tokenizer.encode(cast("str | Chat", prompt))
    ids = list(token_ids(name, values, manifest.vocabulary_size))
    if not ids:
        raise ConfigError(f"{name} is empty; it needs at least one token")
    if len(ids) > manifest.max_seq_len:
        raise ConfigError(
            f"{name} has {len(ids)} tokens, this engine takes {manifest.max_seq_len}; "
            f"shorten it, or build with a larger --max-seq-len"
        )
    return ids


def is_prompt(prompts: Prompt | Iterable[Prompt]) -> bool:
    """Return whether it is one prompt: a string, token ids or messages."""
    if isinstance(prompts, str | Chat):
        return True
    if not isinstance(prompts, Sequence | np.ndarray) or len(prompts) == 0:
        return False
    return isinstance(prompts[0], Mapping | Number)
