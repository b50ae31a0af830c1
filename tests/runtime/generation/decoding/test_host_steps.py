"""Decode steps on ONNX Runtime: as in one run, with little bound anew."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import TinyEngine
from support.models.tiny_model_runs import bindings_of, manager_of
from support.models.tiny_sizes import VOCABULARY

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import ZeroMemory

ROWS = 2


@pytest.fixture
def engine(tiny_engine: TinyEngine) -> Iterator[Engine]:
    with open_engine(tiny_engine.engine, "onnxruntime") as running:
        yield running


@pytest.fixture
def manager(engine: Engine, tiny_engine: TinyEngine) -> LoRAManager:
    """It has an adapter, which is not active."""
    found = manager_of(engine)
    found.load_weights("a", tiny_engine.adapter)
    return found


def in_one_run(engine: Engine, adapter: TensorMap, ids: Array) -> Array:
    """Logits [rows, tokens, vocab] of ids [rows, tokens]."""
    decoder = StaticDecoder(engine, adapter, len(ids))
    return decoder.run(ids, kept=np.arange(ids.size)).reshape(*ids.shape, -1)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of inputs, each time that one is bound."""
    found: list[tuple[str, tuple[int, ...]]] = []
    original = onnxruntime.IOBinding.bind_ortvalue_input

    def noted(self: Any, name: str, value: Any) -> None:
        found.append((name, tuple(value.shape())))
        original(self, name, value)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_ortvalue_input", noted)
    return found


@pytest.mark.parametrize("name", ["", "a"], ids=["base model", "adapter"])
def test_token_by_token_to_the_end_of_the_cache_is_as_in_one_run(
    engine: Engine, manager: LoRAManager, name: str
) -> None:
    length = engine.manifest.max_seq_len
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (ROWS, length))
    decoder = StaticDecoder(engine, bindings_of(manager, name), ROWS)
    found = np.stack([decoder.decode(tokens).copy() for tokens in ids.T], axis=1)
    prompt = ids[:, : engine.manifest.max_input_len]
    expected = in_one_run(engine, bindings_of(manager, name), prompt)
    np.testing.assert_allclose(found[:, : prompt.shape[1]], expected, atol=1e-5)
    assert decoder.cache.lengths.tolist() == [length] * ROWS
    with pytest.raises(TensorError, match=f"{length + 1} tokens are more than this engine's"):
        decoder.decode(ids[:, 0])


@pytest.mark.parametrize("counts", [(1, 2, 1, 2, 2), (2, 1, 1, 2, 1)], ids=["from one", "from all"])
def test_the_number_of_rows_changes_at_any_step(
    engine: Engine,
    manager: LoRAManager,
    counts: Sequence[int],
    bound: list[tuple[str, tuple[int, ...]]],
) -> None:
    ids = np.random.default_rng(1).integers(3, VOCABULARY, (ROWS, len(counts)))
    adapter, done = bindings_of(manager, "a"), [0] * ROWS
    expected = in_one_run(engine, adapter, ids)
    decoder = StaticDecoder(engine, adapter, ROWS)
    bound.clear()
    for count in counts:
        tokens = np.array([ids[row, done[row]] for row in range(count)])
        for row, logits in enumerate(decoder.decode(tokens)):
            np.testing.assert_allclose(logits, expected[row, done[row]], atol=1e-5)
            done[row] += 1
    assert decoder.cache.lengths.tolist() == done
    shapes = [shape for name, shape in bound if name == "input_ids"]  # once for each number
    assert shapes == [(count, 1) for count in dict.fromkeys(counts)]


def test_rows_that_are_not_asked_for_stay_as_they_were_and_get_no_logits(
    engine: Engine, manager: LoRAManager, bound: list[tuple[str, tuple[int, ...]]]
) -> None:
    ids = np.random.default_rng(2).integers(3, VOCABULARY, (ROWS, 3))
    expected = in_one_run(engine, bindings_of(manager, "a"), ids)
    decoder = StaticDecoder(engine, bindings_of(manager, "a"), ROWS)
    decoder.decode(ids[:, 0])
    found = decoder.decode(np.array([0, ids[1, 1]]), rows=np.array([1]))
    assert ("kept", (1,)) in bound
    np.testing.assert_allclose(found, expected[1:, 1], atol=1e-5)
    assert decoder.cache.lengths.tolist() == [1, 2]
    found = decoder.decode(np.array([ids[0, 1], ids[1, 2]]))
    np.testing.assert_allclose(found, [expected[0, 1], expected[1, 2]], atol=1e-5)


def test_the_positions_looked_at_are_all_that_a_step_binds_and_seldom(
    engine: Engine, manager: LoRAManager, bound: list[tuple[str, tuple[int, ...]]]
) -> None:
    decoder = StaticDecoder(engine, bindings_of(manager, "a"), ROWS)
    decoder.decode(np.array([3, 4]))
    at = {}
    for length in range(1, 40):
        bound.clear()
        decoder.decode(np.array([3, 4]))
        if bound:
            at[length] = tuple(bound)
    assert at == {16: (("bound", (32,)),), 32: (("bound", (48,)),)}


def test_a_switch_between_tokens_takes_effect_at_the_next(
    engine: Engine, manager: LoRAManager
) -> None:
    ids = np.random.default_rng(3).integers(3, VOCABULARY, (1, 6))
    maps = {name: bindings_of(manager, name) for name in ("", "a")}
    decoder, plain = (StaticDecoder(engine, maps[""], 1) for _ in range(2))
    for at, name in enumerate(["", "a", "a", "", "a", ""]):
        for each in (decoder, plain):
            each.use_adapter(maps[name])
        found, expected = decoder.decode(ids[:, at]), plain.run(ids[:, at : at + 1])
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_adapter_is_let_go_of_with_the_next_token_of_another(
    engine: Engine, manager: LoRAManager
) -> None:
    decoder = StaticDecoder(engine, bindings_of(manager, "a"), ROWS)
    decoder.decode(np.array([3, 4]))
    decoder.decode(np.array([3]))
    tensors = [t for t in bindings_of(manager, "a").values() if not isinstance(t.owner, ZeroMemory)]
    adapter = [weakref.ref(tensor.owner) for tensor in tensors]
    del tensors
    decoder.use_adapter(bindings_of(manager))
    decoder.decode(np.array([5]))
    manager.unload("a")
    gc.collect()
    assert adapter
    assert all(owner() is None for owner in adapter)
