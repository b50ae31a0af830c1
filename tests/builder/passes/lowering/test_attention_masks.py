"""Masks of a static cache, told from their own graphs."""

import onnx_ir as ir
import pytest
from support.models.static_graphs import BOTH_WAYS, MAX_LEN, Layer, named

from trt_lora.builder.passes.lowering.attention_masks import FULL, attention_window, boolean_mask

# A token sees its own place and every second one before it.
_EVERY_SECOND = """
  behind = Sub(rows, keys)
  causal = LessOrEqual(keys, rows)
  pair = Add(one, one)
  odd = Mod(behind, pair)
  is_even = Less(odd, one)
  seen = And(causal, is_even)
"""


def window_of(layer: Layer) -> int | None:
    model = layer.model()
    return attention_window(model, named(model, "seen"), MAX_LEN)


def test_a_causal_mask_has_no_window() -> None:
    assert window_of(Layer()) == FULL


@pytest.mark.parametrize("window", [1, 3, MAX_LEN - 1])
def test_a_sliding_window_is_found(window: int) -> None:
    assert window_of(Layer(window=window)) == window


def test_a_window_as_long_as_the_cache_is_none() -> None:
    assert window_of(Layer(window=MAX_LEN)) == FULL


@pytest.mark.parametrize("mask", [BOTH_WAYS, _EVERY_SECOND])
def test_a_mask_that_is_not_causal_has_no_answer(mask: str) -> None:
    assert window_of(Layer(mask=mask)) is None


def test_a_mask_that_the_cache_decides_has_no_answer() -> None:
    model = Layer(mask="seen = Cast<to = 9>(cache_k)").model()
    assert attention_window(model, named(model, "seen"), MAX_LEN) is None


def test_a_mask_is_boolean_where_it_is_0_or_a_large_negative_number() -> None:
    model = Layer().model()
    mask = named(model, "mask")
    assert boolean_mask(mask) is named(model, "seen")
    hidden = model.graph.initializers["hidden"]
    hidden.const_value = ir.tensor(1.0, name="hidden")
    assert boolean_mask(mask) is None
    assert boolean_mask(named(model, "attended")) is None
