"""Models that cannot have rows of different lengths in one cache are found before the trace."""

from typing import Any

import pytest
import torch
from support.models.architectures import small_model

from trt_lora.builder.export.cache_layout import cache_layouts
from trt_lora.builder.export.static_cache import RowCache
from trt_lora.builder.export.static_check import static_cache_obstacle


def obstacle(model: Any) -> str:
    found: str = static_cache_obstacle(model.eval(), cache_layouts(model.eval()))
    return found


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral"])
def test_a_model_that_goes_by_positions_and_masks_can(model_type: str) -> None:
    assert obstacle(small_model(model_type)) == ""


@pytest.mark.parametrize("model_type", ["gpt_neo", "roformer"])
def test_a_model_with_one_length_for_all_rows_is_refused(model_type: str) -> None:
    reason = obstacle(small_model(model_type))
    assert "rows of different lengths change each other: a logit is off by" in reason


def test_a_model_that_cannot_be_run_in_rows_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, layer_idx: int = 0) -> Any:
        raise NotImplementedError("first\nsecond")

    monkeypatch.setattr(RowCache, "get_query_offset", broken)
    assert obstacle(small_model("llama")) == "NotImplementedError: first second"


def test_without_a_trace_rows_are_written_at_their_lengths() -> None:
    old = torch.full((2, 1, 6, 1), -1.0)
    new = torch.arange(4.0).reshape(2, 1, 2, 1)
    cache = RowCache([(old, old)], torch.tensor([0, 3]), bound=5, new_tokens=2)
    keys, values = cache.update(new, new + 10, 0)
    assert keys[:, 0, :, 0].tolist() == [[0, 1, -1, -1, -1], [-1, -1, -1, 2, 3]]
    assert values[:, 0, :2, 0].tolist() == [[10, 11], [-1, -1]]
    written, _ = cache.written
    assert written.shape == old.shape
    assert written[1, 0, 5] == -1
