"""A checkpoint: a build parses each file of a base model once, but for what transformers does."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from support.models.checkpoints import halves, with_file, with_shards
from support.models.quick_build import quick_build
from support.models.tiny_models import tiny_config

from trt_lora.builder.build import list_sites
from trt_lora.builder.checkpoint import model_directory
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.plugins.errors import ModelError
from trt_lora.runtime.files.json_file import read_json

Opened = Counter[str]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """How often we parsed every JSON file and every header of weights; fills as that happens."""
    counts = Opened()
    safe_open = safetensors.safe_open

    def counting_json(path: Path, *args: Any) -> Any:
        counts[path.name] += 1
        return read_json(path, *args)

    def counting_header(path: Path, framework: str) -> Any:
        counts[path.name] += framework == "np"  # values are read in torch's
        return safe_open(path, framework=framework)

    monkeypatch.setattr(model_directory, "read_json", counting_json)
    monkeypatch.setattr(safetensors, "safe_open", counting_header)
    return counts


@pytest.mark.parametrize("run", [list_sites, quick_build])
def test_config_and_headers_are_parsed_once(
    run: Callable[..., object], model: Path, tmp_path: Path, opened: Opened
) -> None:
    directory = with_shards(model, tmp_path / "m", halves(model))
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    run(tiny_config(directory, tmp_path / "engine"))
    small = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    shards = {path.name for path in directory.glob("*.safetensors")}
    assert opened == dict.fromkeys(small | shards, 1)
    assert len(shards) == 2


def test_weights_wait_until_they_are_asked_for(model: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(with_file(model, tmp_path / "m", "model.safetensors", b"\x80damaged"))
    assert checkpoint.fields == json.loads((model / "config.json").read_text())
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        _ = checkpoint.headers
