"""Sources of an encoder-decoder: texts, token ids or features, checked against the engine."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.text.token_ids import token_ids
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import EncoderPart, Manifest, refuse_graph
from trt_lora.runtime.memory.dtypes import Array, storage_dtype

Source = str | Sequence[int] | Array  # an array of floats [bins, frames] is features


def source_array(
    name: str, source: Source | None, tokenizer: TextTokenizer | None, manifest: Manifest
) -> Array | None:
    """Return a source as the encoder takes it: ids [s] int64, or features in the engine's dtype.

    Raises:
        ConfigError: the engine needs a source and there is none, or the reverse; it is of the
            other kind, empty, longer than the engine takes, or holds what is no token or number.
            The message begins with `name`.
    """
    part = manifest.encoder
    if part is None:
        if source is not None:
            raise ConfigError(
                f"{name} has a source, and this engine of {manifest.base_model.architecture} is a "
                "decoder, which reads none; put the text into the prompt"
            )
        return None
    if source is None:
        raise ConfigError(
            f"{name} has no source, and this engine of {manifest.base_model.architecture} is an "
            "encoder-decoder, which reads one; call Engine.generate(sources=...)"
        )
    if part.takes_features:
        return _features(name, source, part)
    if isinstance(source, str):
        if tokenizer is None:
            raise ConfigError(f"{name} has a text as its source, and there is no tokenizer")
        source = tokenizer.encode_text(source)
    return _ids(name, source, manifest, part)


def refuse_encoder(manifest: Manifest, what: str) -> None:
    """Refuse an engine that is no decoder: a graph, or one whose requests need a source.

    Raises:
        ConfigError: the engine is a graph or an encoder-decoder.
    """
    refuse_graph(manifest, what)
    if manifest.encoder is not None:
        raise ConfigError(
            f"{what} takes decoders alone, and this engine of {manifest.base_model.architecture} "
            "is an encoder-decoder; call Engine.generate(sources=...)"
        )


def is_single(sources: object) -> bool:
    """Whether it is one source: a text, token ids, or features [bins, frames]."""
    if isinstance(sources, np.ndarray):
        return sources.ndim < 3 and (sources.ndim == 1 or sources.dtype.kind == "f")
    first = sources[0] if isinstance(sources, Sequence) and len(sources) else None
    return isinstance(sources, str) or isinstance(first, int | np.integer)


def _ids(name: str, source: object, manifest: Manifest, part: EncoderPart) -> Array:
    vocabulary = manifest.vocabulary_size
    ids = np.array(token_ids(f"{name}: its source", source, vocabulary), np.int64)
    if not 1 <= ids.size <= part.max_source_len:
        raise ConfigError(
            f"{name} has a source of {ids.size} tokens, this engine takes 1 to "
            f"{part.max_source_len}; shorten it, or build with a larger --max-source-len"
        )
    return ids


def _features(name: str, source: object, part: EncoderPart) -> Array:
    expected = tuple(cast("Sequence[int]", part.source.shape[1:]))
    found: Any = source if isinstance(source, np.ndarray) else np.empty(0)
    if found.dtype.kind != "f" or found.shape != expected or not np.isfinite(found).all():
        raise ConfigError(
            f"{name} has a source that is {type(source).__name__} {list(found.shape)}, this engine "
            f"takes an array of finite features {list(expected)}; pass what the model's processor "
            "makes of the sound"
        )
    array: Array = np.ascontiguousarray(found, storage_dtype(part.source.dtype))
    return array
