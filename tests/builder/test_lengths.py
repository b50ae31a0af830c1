"""How long prompts and answers may be: options, defaults and the positions of the model."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, BloomConfig, GPT2Config, LlamaConfig, MptConfig

from trt_lora.builder import BuildConfig
from trt_lora.builder.lengths import Lengths, choose_lengths
from trt_lora.plugins.errors import ConfigError


def lengths(model_config: Any, **options: Any) -> tuple[int, int]:
    """The longest prompt and the most tokens in all."""
    chosen = choose_lengths(BuildConfig(Path("m"), Path("e"), ("q_proj",), **options), model_config)
    assert chosen == Lengths(chosen.max_input_len, chosen.max_seq_len)
    return chosen.max_input_len, chosen.max_seq_len


def llama(positions: int) -> Any:
    """A model with rotary embeddings for so many positions."""
    return LlamaConfig(max_position_embeddings=positions)


@pytest.mark.parametrize(
    ("positions", "options", "expected"),
    [
        (131072, {}, (1024, 2048)),
        (1500, {}, (1024, 1500)),
        (512, {}, (512, 512)),
        (131072, {"max_seq_len": 512}, (512, 512)),
        (131072, {"max_seq_len": 4096}, (1024, 4096)),
        (131072, {"max_input_len": 100}, (100, 2048)),
        (131072, {"max_input_len": 3000}, (3000, 6000)),
        (4096, {"max_input_len": 3000}, (3000, 4096)),
        (4096, {"max_input_len": 4096}, (4096, 4096)),
        (131072, {"max_input_len": 100, "max_seq_len": 100}, (100, 100)),
    ],
)
def test_what_is_left_out_follows_what_is_asked_for_and_what_the_model_has(
    positions: int, options: dict[str, int], expected: tuple[int, int]
) -> None:
    assert lengths(llama(positions), **options) == expected


@pytest.mark.parametrize(
    ("model_config", "expected"),
    [
        (GPT2Config(n_positions=640), (640, 640)),
        (MptConfig(max_seq_len=700), (700, 700)),
        (BloomConfig(), (1024, 2048)),
        (AutoConfig.for_model("gemma3", text_config={"max_position_embeddings": 96}), (96, 96)),
    ],
    ids=["n_positions", "max_seq_len", "no limit", "text_config"],
)
def test_every_way_to_say_how_many_positions_there_are(
    model_config: Any, expected: tuple[int, int]
) -> None:
    assert lengths(model_config) == expected


@pytest.mark.parametrize("option", ["max_seq_len", "max_input_len"])
def test_more_than_the_model_has_is_refused_with_its_limit(option: str) -> None:
    name = "--" + option.replace("_", "-")
    message = f"{name} is 65, but the model has 64 positions; pass {name} 64 or less"
    with pytest.raises(ConfigError, match=message):
        lengths(llama(64), **{option: 65})
    assert lengths(llama(64), **{option: 64}) == (64, 64)


def test_a_prompt_longer_than_the_whole_is_refused_with_both_named() -> None:
    with pytest.raises(
        ConfigError, match=r"--max-input-len is 65, but --max-seq-len, .*, is 64; lower .* or raise"
    ):
        lengths(llama(128), max_input_len=65, max_seq_len=64)
