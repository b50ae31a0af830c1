"""Prefill and decode on a fake engine: what it is fed, and what comes back."""

from collections.abc import Sequence

import numpy as np
import pytest
from support.fakes.fake_engine import VOCAB, FakeExecutor, make_manifest

from trt_lora.plugins.errors import TensorError
from trt_lora.runtime.generation.decoding.growing_decoder import GrowingDecoder
from trt_lora.runtime.generation.decoding.step_inputs import empty_cache, left_pad
from trt_lora.runtime.managers.lora_manager import LoRAManager
from trt_lora.runtime.memory.tensor import TensorMap

PROMPTS = [[3, 4, 5], [6]]


def bindings_of(executor: FakeExecutor) -> TensorMap:
    manager, tensor_map = LoRAManager(), TensorMap()
    manager.initialize_engine_bindings(executor)
    manager.refresh_tensor_map(tensor_map)
    return tensor_map


def prefilled(executor: FakeExecutor, prompts: Sequence[Sequence[int]] = PROMPTS) -> GrowingDecoder:
    decoder = GrowingDecoder(executor, bindings_of(executor), len(prompts))
    decoder.step(*left_pad(prompts, 0))
    return decoder


def column(*tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(tokens, np.int64)[:, None]


# --------------------------------------------------------------------------------------- left_pad


def test_padding_comes_first_so_that_all_prompts_end_together() -> None:
    ids, mask = left_pad([[7, 8, 9], [5], [1, 2]], 4)
    np.testing.assert_array_equal(ids, [[7, 8, 9], [4, 4, 5], [4, 1, 2]])
    np.testing.assert_array_equal(mask, [[1, 1, 1], [0, 0, 1], [0, 1, 1]])
    assert ids.dtype == mask.dtype == np.int64


def test_a_prompt_that_holds_the_padding_token_is_not_masked() -> None:
    _, mask = left_pad([[0, 0, 1]], 0)
    np.testing.assert_array_equal(mask, [[1, 1, 1]])


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_no_prompt_and_an_empty_prompt_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(TensorError, match="every prompt needs at least one token"):
        left_pad(prompts, 0)


# ------------------------------------------------------------------------------------ empty_cache


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_cache_is_empty_before_the_first_token(dtype: str) -> None:
    cache = empty_cache(make_manifest(dtype=dtype), 3)
    assert {name: (t.shape, t.dtype) for name, t in cache.items()} == {
        "past_key_values.0.key": ((3, 2, 0, 3), dtype),
        "past_key_values.0.value": ((3, 2, 0, 3), dtype),
    }


# -------------------------------------------------------------------------------------------- step


def test_the_prefill_feeds_the_padded_prompts_and_an_empty_cache() -> None:
    executor = FakeExecutor()
    prefilled(executor)
    (fed,) = executor.calls
    np.testing.assert_array_equal(fed["input_ids"], [[3, 4, 5], [0, 0, 6]])
    np.testing.assert_array_equal(fed["attention_mask"], [[1, 1, 1], [0, 0, 1]])
    np.testing.assert_array_equal(fed["position_ids"], [[0, 1, 2], [0, 0, 0]])
    assert fed["past_key_values.0.key"].shape == (2, 2, 0, 3)


def test_a_decode_step_feeds_one_column_the_whole_mask_and_the_cache() -> None:
    executor = FakeExecutor()
    prefilled(executor).step(column(7, 8), column(1, 1))
    fed = executor.calls[-1]
    np.testing.assert_array_equal(fed["input_ids"], [[7], [8]])
    np.testing.assert_array_equal(fed["attention_mask"], [[1, 1, 1, 1], [0, 0, 1, 1]])
    np.testing.assert_array_equal(fed["position_ids"], [[3], [1]])
    np.testing.assert_array_equal(
        fed["past_key_values.0.value"][:, 0, :, 0], [[3, 4, 5], [0, 0, 6]]
    )


def test_a_sequence_that_has_ended_goes_on_as_padding() -> None:
    executor = FakeExecutor()
    decoder = prefilled(executor)
    decoder.step(column(7, 0), column(1, 0))
    decoder.step(column(8, 0), column(1, 0))
    fed = executor.calls[-1]
    np.testing.assert_array_equal(fed["attention_mask"], [[1, 1, 1, 1, 1], [0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(fed["position_ids"], [[4], [0]])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_logits_of_the_last_position_come_back_as_float32(dtype: str) -> None:
    executor = FakeExecutor(make_manifest(dtype=dtype))
    decoder = GrowingDecoder(executor, bindings_of(executor), 2)
    logits = decoder.step(*left_pad(PROMPTS, 0))
    assert logits.shape == (2, 1, VOCAB)
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits.argmax(axis=-1), [[6], [7]])


def test_as_many_last_positions_are_kept_as_asked_for() -> None:
    executor = FakeExecutor()
    decoder = GrowingDecoder(executor, bindings_of(executor), 2)
    logits = decoder.step(*left_pad(PROMPTS, 0), keep=2)
    np.testing.assert_array_equal(executor.calls[0]["logits_to_keep"], [1, 2])
    np.testing.assert_array_equal(logits.argmax(axis=-1), [[5, 6], [1, 7]])


def test_more_positions_than_were_given_cannot_be_kept() -> None:
    executor = FakeExecutor()
    decoder = GrowingDecoder(executor, bindings_of(executor), 2)
    with pytest.raises(TensorError):
        decoder.step(*left_pad(PROMPTS, 0), keep=4)


def test_tokens_in_two_steps_feed_what_one_step_would() -> None:
    at_once, in_two = FakeExecutor(), FakeExecutor()
    prefilled(at_once, [[3, 4, 5, 6]]).step(column(7), column(1))
    decoder = prefilled(in_two, [[3, 4]])
    decoder.step(np.array([[5, 6]]), np.array([[1, 1]]))
    decoder.step(column(7), column(1))
    assert at_once.calls[-1].keys() == in_two.calls[-1].keys()
    for name, fed in at_once.calls[-1].items():
        np.testing.assert_array_equal(fed, in_two.calls[-1][name])


def test_the_length_counts_all_positions_with_their_padding() -> None:
    executor = FakeExecutor()
    decoder = GrowingDecoder(executor, bindings_of(executor), 2)
    assert decoder.length == 0
    decoder.step(*left_pad(PROMPTS, 0))
    decoder.step(column(7, 0), column(1, 0))
    assert decoder.length == 4


def test_a_decoder_leaves_the_callers_map_alone() -> None:
    executor = FakeExecutor()
    tensor_map = bindings_of(executor)
    before = dict(tensor_map)
    GrowingDecoder(executor, tensor_map, 1).step(*left_pad([[1]], 0))
    assert tensor_map == before


def test_two_decoders_on_one_engine_do_not_mix() -> None:
    executor = FakeExecutor()
    first, second = prefilled(executor, [[3, 4, 5]]), prefilled(executor, [[6]])
    first.step(column(7), column(1))
    second.step(column(7), column(1))
    assert (first.length, second.length) == (4, 2)
    np.testing.assert_array_equal(executor.calls[-1]["position_ids"], [[1]])
    assert executor.calls[-1]["past_key_values.0.key"].shape[2] == 1


def test_the_engines_length_may_be_reached_but_not_passed() -> None:
    executor = FakeExecutor()  # takes 32 tokens
    decoder = prefilled(executor, [[1] * 31])
    decoder.step(column(2), column(1))
    with pytest.raises(TensorError, match="33 tokens are more than this engine's 32; shorten"):
        decoder.step(column(3), column(1))
    assert len(executor.calls) == 2
    assert decoder.length == 32


def test_a_step_that_fails_takes_no_position(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    decoder = prefilled(executor)

    def fail(tensor_map: TensorMap) -> None:
        raise TensorError("refused")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "execute", fail)
        with pytest.raises(TensorError, match="refused"):
            decoder.step(column(7, 8), column(1, 1))
    assert decoder.length == 3
