"""Validation of token ids against a vocabulary."""

from collections.abc import Iterable

import numpy as np

from trt_lora.plugins.errors import ConfigError


def token_ids(label: str, values: object, vocabulary: int | None = None) -> tuple[int, ...]:
    """Return ids as Python's numbers.

    Args:
        label: what holds them, for messages.
        values: a list, tuple, set, numpy array or other collection.
        vocabulary: number of tokens the model knows; None where that is not known yet.

    Raises:
        ConfigError: it is no collection, or holds something that is no id of the vocabulary.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ConfigError(
            f"{label} is {values!r}, expected a collection of token ids, such as (2,)"
        )
    return tuple(_token_id(label, value, vocabulary) for value in values)


def _token_id(label: str, value: object, vocabulary: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        kind = type(value).__name__
        # What is no number may be a prompt, which nobody wants to read in an error.
        told = f"{value!r:.80} ({kind})" if isinstance(value, float | bool) else f"a {kind}"
        raise ConfigError(f"{label} holds {told}, expected token ids: whole numbers")
    if value < 0 or (vocabulary is not None and value >= vocabulary):
        most = f"to {vocabulary - 1}" if vocabulary is not None else "or more"
        raise ConfigError(f"{label} holds token id {value}, expected 0 {most}: the vocabulary")
    return int(value)
