"""Parameters of Triton's model: each is a number of its kind, or refused by its name."""

from pathlib import Path

import pytest

from trt_lora.plugins.errors import ConfigError, ManifestError
from trt_lora.runtime.scaleout.triton.settings import Settings, read_settings


def settings(**given: str) -> Settings:
    told = {"engine": "engines/many", **given}
    return read_settings({name: {"string_value": value} for name, value in told.items()})


def test_what_is_left_out_has_its_default_and_triton_s_own_are_not_looked_at() -> None:
    assert settings(FORCE_CPU_ONLY_INPUT_TENSORS="no") == Settings("engines/many")
    found = settings(rows="4", max_queue="0", lora_cache_gpu_memory_fraction="0.5")
    assert (found.rows, found.max_queue, found.lora_cache_gpu_memory_fraction) == (4, 0, 0.5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": ""}, "parameter 'engine' is missing"),
        ({"adapters": "nowhere"}, "parameter 'adapters' is 'nowhere', which is no folder"),
        ({"adaptors": "a"}, "parameter 'adaptors' is unknown.*did you mean 'adapters'"),
        ({"rows": "four"}, "parameter 'rows' is 'four', expected a whole number"),
        ({"rows": "0"}, "parameter 'rows' is 0, expected .* 1 or more"),
        ({"max_queue": "-1"}, "parameter 'max_queue' is -1"),
        ({"lora_cache_gpu_memory_fraction": "half"}, "expected a number"),
    ],
)
def test_what_has_no_meaning_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**given)


def test_an_engine_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError):
        settings(engine=str(tmp_path)).open()
