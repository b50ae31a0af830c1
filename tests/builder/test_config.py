"""Options of a build: what one decides about another, and what contradicts."""

from pathlib import Path
from typing import Any

import pytest

from trt_lora.builder import BuildConfig
from trt_lora.plugins.errors import ConfigError


def config(**options: Any) -> BuildConfig:
    return BuildConfig(Path("model"), Path("engine"), ("attn_q",), **options)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, 0),
        ({"max_loras": 3}, 3),
        ({"lora_mode": "slots"}, 8),
        ({"lora_mode": "slots", "max_loras": 3}, 3),
        ({"lora_mode": "single"}, 0),
    ],
)
def test_the_mode_and_the_number_of_slots_decide_each_other(
    options: dict[str, Any], slots: int
) -> None:
    assert config(**options).max_loras == slots


def test_one_adapter_for_all_rows_in_several_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--lora-mode single is one .* is 3; leave"):
        config(lora_mode="single", max_loras=3)
    with pytest.raises(ConfigError, match="choose from: auto, single, slots"):
        config(lora_mode="many")
