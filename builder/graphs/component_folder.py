"""The folder of one component of a diffusers pipeline: what its files say without torch.

config.json names its class, as diffusers and transformers write it:
https://huggingface.co/docs/diffusers/using-diffusers/loading
"""

import hashlib
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.files.file_record import sampled_sha256
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.manifest import BaseModel

MODEL_INDEX = "model_index.json"  # of a pipeline
_CONFIG = "config.json"
_OF_TRANSFORMERS = (
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "T5EncoderModel",
    "UMT5EncoderModel",
    "ViTForImageClassification",
    "ViTModel",
)


def is_component(folder: Path) -> bool:
    """Whether a folder is that of a denoiser or a text encoder."""
    try:
        config = read_json(folder / _CONFIG)
    except AdapterError:  # of a language model, whose reader says what is wrong
        return False
    return "_class_name" in config or _class_of(config) in _OF_TRANSFORMERS


def component_class(folder: Path) -> str:
    """Return the name of the class of the module in a folder; empty: its config says none.

    Raises:
        AdapterError: it has no config, or that cannot be read.
        ConfigError: it is that of a whole pipeline.
    """
    if (folder / MODEL_INDEX).is_file():
        raise ConfigError(f"{folder} is a pipeline, whose engines `build_pipeline` makes")
    return _class_of(read_json(folder / _CONFIG))


def _class_of(config: dict[str, Any]) -> str:
    architectures = config.get("architectures") or [""]
    return str(config.get("_class_name", architectures[0]))


def describe_component(folder: Path) -> BaseModel:
    """Return what the manifest says of a folder; its fingerprint is of its config and weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors"):
            digest.update(f"{file.name}\0{sampled_sha256(file)}\0".encode())
    name = f"{folder.resolve().parent.name}/{folder.name}"
    return BaseModel(name, component_class(folder), digest.hexdigest())
