"""Sources: of the kind and size that an engine reads, or refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.fakes.fake_engine import VOCAB, make_manifest
from support.refusals import refused

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.sources import is_single, source_array
from trt_lora.runtime.manifest import Binding, EncoderPart, TokenRules


def manifest(*shape: int | str, dtype: str = "int64") -> Any:
    source = Binding("source", dtype, ("batch", *shape))
    part = EncoderPart((source,), (), {}, max_source_len=4, rules=TokenRules(0))
    return replace(make_manifest(), encoder=part)


TOKENS, FEATURES = manifest("source_size"), manifest(2, 3, dtype="float16")


def test_tokens_and_features_come_as_the_encoder_takes_them() -> None:
    ids = source_array("it", [1, 2], None, TOKENS)
    features = source_array("it", np.ones((2, 3)), None, FEATURES)
    assert ids is not None
    assert features is not None
    assert (str(ids.dtype), ids.tolist()) == ("int64", [1, 2])
    assert (str(features.dtype), features.shape) == ("float16", (2, 3))
    assert source_array("it", None, None, make_manifest()) is None


@pytest.mark.parametrize(
    ("of", "source", "said"),
    [
        (TOKENS, [], "0 tokens, this engine takes 1 to 4"),
        (TOKENS, [1] * 5, "5 tokens, this engine takes 1 to 4"),
        (TOKENS, [VOCAB], f"token id {VOCAB}"),
        (TOKENS, "hello", "there is no tokenizer"),
        (TOKENS, None, "no source"),
        (TOKENS, np.ones((2, 3), np.float32), "expected token ids"),
        (FEATURES, [1, 2], "is list [0], this engine takes an array of finite features [2, 3]"),
        (FEATURES, np.ones((2, 4)), "is ndarray [2, 4]"),
        (FEATURES, np.full((2, 3), np.nan), "finite features"),
        (make_manifest(), [1], "is a decoder, which reads none"),
    ],
)
def test_another_source_is_refused(of: Any, source: Any, said: str) -> None:
    with refused(ConfigError, "it", said):
        source_array("it", source, None, of)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ("text", True),
        ([1, 2], True),
        (np.array([1, 2]), True),
        (np.ones((2, 3), np.float32), True),
        (["text"], False),
        ([[1], [2, 3]], False),
        (np.ones((2, 2, 3), np.float32), False),
        (np.ones((2, 3), np.int64), False),
        ([], False),
    ],
)
def test_one_source_is_told_from_several(sources: object, expected: bool) -> None:
    assert is_single(sources) is expected
