"""Rows of a static cache that are run by hand answer as in one run."""

from collections.abc import Iterator

import numpy as np
import pytest
from conftest import TinyEngine
from support.models.tiny_sizes import VOCABULARY

from trt_lora.runtime import LoRAManager, TensorMap, open_engine
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder

ROWS, FIRST, TOKENS = 2, 5, 9


@pytest.fixture
def decoders(tiny_engine: TinyEngine) -> Iterator[tuple[StaticDecoder, StaticDecoder]]:
    """Two, each with a cache of its own."""
    with open_engine(tiny_engine.engine, "onnxruntime") as engine:
        manager, tensor_map = LoRAManager(), TensorMap()
        manager.initialize_engine_bindings(engine)
        manager.refresh_tensor_map(tensor_map)
        yield StaticDecoder(engine, tensor_map, ROWS), StaticDecoder(engine, tensor_map, ROWS)


@pytest.mark.parametrize(
    "kept", [[3, 7], [0, 5, 6, 7], [7, 0], [5]], ids=["last", "some", "turned", "one row"]
)
def test_several_rows_go_on_where_they_were(
    decoders: tuple[StaticDecoder, StaticDecoder], kept: list[int]
) -> None:
    whole, parts = decoders
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (ROWS, TOKENS))
    every = whole.run(ids, kept=np.arange(ids.size)).reshape(ROWS, TOKENS, -1)
    parts.run(ids[:, :FIRST])
    found = parts.run(ids[:, FIRST:], kept=np.array(kept))
    expected = every[:, FIRST:].reshape(ROWS * (TOKENS - FIRST), -1)[kept]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert parts.cache.lengths.tolist() == whole.cache.lengths.tolist() == [9, 9]


def test_what_is_padding_in_a_later_part_is_overwritten(
    decoders: tuple[StaticDecoder, StaticDecoder],
) -> None:
    whole, parts = decoders
    ids = np.random.default_rng(1).integers(3, VOCABULARY, (ROWS, TOKENS))
    whole.run(ids)
    expected = whole.decode(ids[:, 0])
    parts.run(ids[:, :FIRST])
    new = np.array([4, 2])
    parts.run(ids[:, FIRST:], new=new)
    assert parts.cache.lengths.tolist() == [9, 7]
    parts.run(ids[1:2, -2:], first=1)
    np.testing.assert_allclose(parts.decode(ids[:, 0]), expected, atol=1e-5)
