"""Names of models in the hub's cache."""

from pathlib import PurePosixPath

import pytest

from trt_lora.runtime.files.hub_cache import model_name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/c/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/0f3a", "HuggingFaceTB/SmolLM2-135M"),
        ("/c/hub/models--gpt2/snapshots/0f3a", "gpt2"),
        ("/c/hub/models--org--name/snapshots/0f3a/part", "org/name"),
        ("/data/llama", "llama"),
        ("llama", "llama"),
        ("/data/snapshots/0f3a", "0f3a"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
    ],
)
def test_a_model_is_called_as_on_the_hub_or_as_its_folder(path: str, name: str) -> None:
    assert model_name(PurePosixPath(path)) == name
