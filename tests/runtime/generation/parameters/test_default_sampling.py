"""Sampling parameters from `generation_config.json`: honoured, without effect, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.generation.parameters import default_sampling as module
from trt_lora.runtime.generation.parameters.default_sampling import default_sampling
from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams

pytestmark = pytest.mark.needs_torch


def recommended(directory: Path, fields: Any) -> SamplingParams:
    (directory / "generation_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return default_sampling(directory)


# As some models on the hub have them.
LLAMA = {
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": [128001, 128008, 128009],
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.45.0.dev0",
}
QWEN = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "pad_token_id": 151643,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingParams(max_tokens=64, temperature=0)),
        (LLAMA, SamplingParams(max_tokens=64, temperature=0.6, top_p=0.9)),
        (
            QWEN,
            SamplingParams(
                max_tokens=64,
                temperature=0.7,
                top_p=0.8,
                top_k=20,
                repetition_penalty=1.05,
            ),
        ),
        ({"do_sample": True}, SamplingParams(max_tokens=64, temperature=1)),
        (
            {"do_sample": True, "min_p": 0.1},
            SamplingParams(max_tokens=64, temperature=1, min_p=0.1),
        ),
        (
            {"repetition_penalty": 1.3},
            SamplingParams(max_tokens=64, repetition_penalty=1.3, temperature=0),
        ),
        (
            {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0},
            SamplingParams(max_tokens=64, temperature=0),
        ),
        (
            {"temperature": 0.6, "top_p": 0.9},
            SamplingParams(max_tokens=64, temperature=0),
        ),  # Llama 2: greedy in transformers
        (
            {"temperature": None, "num_beams": 1, "_from_model_config": True},
            SamplingParams(max_tokens=64, temperature=0),
        ),
        ({"max_new_tokens": 2048}, SamplingParams(max_tokens=2048, temperature=0)),
        ({"stop_strings": ["User:"]}, SamplingParams(max_tokens=64, stop=["User:"], temperature=0)),
    ],
)
def test_what_a_model_recommends_is_the_default(
    tmp_path: Path, fields: Any, expected: SamplingParams
) -> None:
    assert recommended(tmp_path, fields) == expected


def test_without_the_file_the_default_is_greedy(tmp_path: Path) -> None:
    assert default_sampling(tmp_path) == SamplingParams(max_tokens=64, temperature=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"do_sample": "yes"}, "do_sample is 'yes', expected true or false"),
        ({"do_sample": True, "temperature": "0.7"}, "temperature is '0.7', expected a number"),
        ({"do_sample": True, "top_p": 1.5}, r"top_p is 1\.5, expected a number, above 0"),
        ({"num_beams": 4}, "num_beams is 4, which is not done here; expected 1"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size is 3, which is not done here"),
        ({"bad_words_ids": [[3]]}, r"bad_words_ids is \[\[3\]\], which is not done here"),
        ({"forced_eos_token_id": 2}, "forced_eos_token_id is 2, and this field is unknown"),
        ({"temprature": 0.7}, r"temprature is 0\.7, and this field is unknown"),
        ([], "holds a list, not an object; build the engine again"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, fields: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json:? .*{message}") as caught:
        recommended(tmp_path, fields)
    assert "pass sampling parameters of your own, or --generation-config none" in str(caught.value)


def test_fields_of_transformers_are_known_or_refused_by_choice() -> None:
    """A field of another release is looked at before it is let through or named here."""
    known = module._WITHOUT_EFFECT | module._HONOURED.keys() | module._OFF.keys() | {"do_sample"}
    theirs: Any = GenerationConfig
    fields = {name for name in theirs().to_dict() if not name.startswith("_")}
    assert fields - known == {
        *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        *("sequence_bias", "watermarking_config", "max_time", "top_h", "dola_layers"),
        *("constraints", "force_words_ids"),
    }
