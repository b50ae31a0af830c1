"""Checkpoints with one fault planted: a copy whose config, weights or files are not as saved."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checks.config_fields import check_fields
from trt_lora.builder.checks.model_config import read_config
from trt_lora.plugins.errors import ModelError

Weights = dict[str, torch.Tensor]

WEIGHTS_FILE = "model.safetensors"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
Q, UP = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def with_config(model: Path, directory: Path, **fields: Any) -> Path:
    """Copy a model; `fields` replace those of its config."""
    shutil.copytree(model, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return directory


def with_weights(model: Path, directory: Path, change: Callable[[Weights], Weights]) -> Path:
    """Copy a model; its weights are what `change` returns of them."""
    shutil.copytree(model, directory)
    save_file(change(weights_of(directory)), directory / WEIGHTS_FILE, {"format": "pt"})
    return directory


def with_file(model: Path, directory: Path, name: str, content: str | bytes) -> Path:
    """Copy a model; the file `name` holds `content`."""
    shutil.copytree(model, directory)
    data = content.encode() if isinstance(content, str) else content
    (directory / name).write_bytes(data)
    return directory


def with_shards(model: Path, directory: Path, shards: Mapping[str, Weights]) -> Path:
    """Copy a model; its weights lie in `shards`, by file name, with an index."""
    shutil.copytree(model, directory)
    (directory / WEIGHTS_FILE).unlink()
    for name, weights in shards.items():
        save_file(weights, directory / name, {"format": "pt"})
    homes = {weight: name for name, weights in shards.items() for weight in weights}
    index = {"metadata": {"total_size": 1}, "weight_map": homes}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return directory


def halves(model: Path) -> dict[str, Weights]:
    """Return the weights as two shards."""
    weights = weights_of(model)
    names = sorted(weights)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    return {
        f"model-{number:05}-of-00002.safetensors": {name: weights[name] for name in part}
        for number, part in enumerate(parts, 1)
    }


def weights_of(model: Path) -> Weights:
    """Return what is in the model's one file."""
    return load_file(model / WEIGHTS_FILE)


def in_hub_cache(model: Path, cache: Path, name: str) -> Path:
    """Copy a model as the hub's cache lays it out: links in a snapshot, contents in blobs."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = home / "snapshots" / "0f3a9c", home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    return snapshot


def pickled(model: Path, directory: Path) -> Path:
    """Copy a model; its weights lie in a pickle."""
    shutil.copytree(model, directory)
    torch.save(weights_of(directory), directory / "pytorch_model.bin")
    (directory / WEIGHTS_FILE).unlink()
    return directory


def refusal(directory: Path, dtype: str = "float32") -> str:
    """Read and load a model as a build does, which must fail; return its message, of one line."""
    with pytest.raises(ModelError) as raised:
        load(directory, dtype)
    message = str(raised.value)
    assert "\n" not in message
    return message


def load(directory: Path, dtype: str) -> Any:
    checkpoint, _ = open_checkpoint(directory)
    return load_model(checkpoint, dtype)


def open_checkpoint(directory: Path) -> tuple[Checkpoint, Any]:
    """Check a directory as a build does; return it, and transformers' config of it."""
    checkpoint = Checkpoint(directory)
    check_fields(checkpoint)
    return checkpoint, read_config(checkpoint)


def check_loads(directory: Path, expected: Weights, dtype: str = "float32") -> None:
    """Load a model; its weights must be `expected`, bit by bit."""
    loaded = load(directory, dtype).state_dict()
    assert loaded.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(loaded[name], weight.to(getattr(torch, dtype))), name
