"""How long prompts and answers may be: options, defaults and the positions of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.architectures import small_config
from support.models.tiny_models import POSITIONS
from transformers import AutoModelForCausalLM, GPT2Config, MptConfig, RobertaConfig

from trt_lora.builder import BuildConfig
from trt_lora.builder.checks.config_fields import stated_positions
from trt_lora.builder.checks.lengths import Lengths, choose_lengths
from trt_lora.builder.checks.meta_model import usable_positions
from trt_lora.builder.export.torch_modules import first_position
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import ConfigError


def lengths(positions: int | None, **options: Any) -> tuple[int, int]:
    """The longest prompt and the most tokens in all."""
    chosen = choose_lengths(BuildConfig(Path("m"), Path("e"), ("q_proj",), **options), positions)
    assert chosen == Lengths(chosen.max_input_len, chosen.max_seq_len)
    return chosen.max_input_len, chosen.max_seq_len


def model_of(model_config: Any) -> Any:
    """Without weights."""
    auto: Any = AutoModelForCausalLM
    with suppress_output(), torch.device("meta"):
        return auto.from_config(model_config)


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
    assert lengths(positions, **options) == expected


SMALL_GPT2 = GPT2Config(n_positions=640, n_layer=1, n_embd=8, n_head=1)
SMALL_MPT = MptConfig(max_seq_len=700, d_model=8, n_heads=1, n_layers=1)
SMALL_ROBERTA = RobertaConfig(
    max_position_embeddings=514, is_decoder=True, hidden_size=8, num_attention_heads=1,
    num_hidden_layers=1, pad_token_id=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model_config", "expected"),
    [
        (small_config("llama"), POSITIONS + 8),
        (small_config("gemma3"), POSITIONS + 8),
        (SMALL_GPT2, 640),
        (SMALL_MPT, 700),
        (small_config("bloom"), None),
        (SMALL_ROBERTA, 512),
    ],
    ids=[
        "max_position_embeddings",
        "text_config",
        "n_positions",
        "max_seq_len",
        "no limit",
        "RoBERTa",
    ],
)
def test_every_way_to_say_how_many_positions_there_are(
    model_config: Any, expected: int | None
) -> None:
    assert usable_positions(model_of(model_config)) == expected


def test_the_last_of_robertas_usable_positions_can_be_used_and_the_next_cannot() -> None:
    model: Any = AutoModelForCausalLM
    model = model.from_config(SMALL_ROBERTA).eval()
    first, usable = first_position(model), usable_positions(model)
    assert usable == 512
    token = torch.full((1, 1), 5)
    model(input_ids=token, position_ids=torch.tensor([[first + usable - 1]]))
    with pytest.raises(RuntimeError, match="index 514 is out of bounds"):
        model(input_ids=token, position_ids=torch.tensor([[first + usable]]))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"text_config": {"max_position_embeddings": 32}, "max_position_embeddings": 64}, 32),
        ({"text_config": {}, "max_seq_len": 64}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": True}, None),
        ({}, None),
    ],
)
def test_what_a_config_says_of_positions(fields: dict[str, Any], expected: int | None) -> None:
    assert stated_positions(fields) == expected


@pytest.mark.parametrize("option", ["max_seq_len", "max_input_len"])
def test_more_than_the_model_has_is_refused_with_its_limit(option: str) -> None:
    name = "--" + option.replace("_", "-")
    message = f"{name} is 65, but the model has 64 positions; pass {name} 64 or less"
    with pytest.raises(ConfigError, match=message):
        lengths(64, **{option: 65})
    assert lengths(64, **{option: 64}) == (64, 64)


def test_a_prompt_longer_than_the_whole_is_refused_with_both_named() -> None:
    with pytest.raises(
        ConfigError, match=r"--max-input-len is 65, but --max-seq-len, .*, is 64; lower .* or raise"
    ):
        lengths(128, max_input_len=65, max_seq_len=64)
