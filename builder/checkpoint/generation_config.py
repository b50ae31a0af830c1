"""End-of-sequence and padding token ids from a model's config files."""

import os
from pathlib import Path
from typing import Any

from trt_lora.builder.checkpoint.model_directory import CONFIG_FILE, read_object
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.generation.parameters.default_sampling import GENERATION_FILE


def stop_token_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer; none where the model names none.

    Raises:
        ModelError: generation_config.json is damaged, or what it names are no tokens.
    """
    return _token_ids(directory, config, "eos_token_id", several=True)


def pad_token_id(directory: Path, config: Any) -> int:
    """Return a token for positions that count for nothing: the model's, else a stop token, else 0.

    A token that the embeddings do not have is passed over; some models name one.

    Raises:
        ModelError: generation_config.json is damaged, or what it names is no token.
    """
    named = _token_ids(directory, config, "pad_token_id", several=False)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    candidates = (*named, *stop_token_ids(directory, config))
    return next((token for token in candidates if token < vocabulary), 0)


def _token_ids(directory: Path, config: Any, name: str, *, several: bool) -> tuple[int, ...]:
    path = directory / GENERATION_FILE
    fields = read_object(path) if os.path.lexists(path) else {}
    if name not in fields:
        path, fields = directory / CONFIG_FILE, {name: getattr(config, name, None)}
    value = fields[name]
    tokens = value if several and isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in tokens):
        expected = "a token or a list of tokens" if several else "a token"
        raise ModelError(f"{path}: {name} is {shown(value)}, expected {expected}, as whole numbers")
    return tuple(token for token in tokens if token >= 0)  # -1 means that there is none
