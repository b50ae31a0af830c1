"""The folder of one component of a diffusers pipeline: what its files say without torch.

`model_index.json` of a pipeline names its components, config.json of each its class, as diffusers
and transformers write them: https://huggingface.co/docs/diffusers/using-diffusers/loading
"""

import hashlib
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.files.file_record import sampled_sha256
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.manifest import BaseModel

PIPELINE_FILE = "model_index.json"
_CONFIG = "config.json"
_OF_TRANSFORMERS = (
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "T5EncoderModel",
    "UMT5EncoderModel",
    "ViTForImageClassification",
    "ViTModel",
)
_TAKE_LORA = ("unet", "transformer", "text_encoder")  # beginnings of components' names


def is_component(folder: Path) -> bool:
    """Whether a folder is that of a denoiser or a text encoder.

    Raises:
        ConfigError: it is that of a whole pipeline; the message names its components.
    """
    if (folder / PIPELINE_FILE).is_file():
        parts = [name for name in read_json(folder / PIPELINE_FILE) if name.startswith(_TAKE_LORA)]
        paths = ", ".join(str(folder / name) for name in parts)
        raise ConfigError(f"{folder} is a pipeline; build an engine for each of its parts: {paths}")
    try:
        config = read_json(folder / _CONFIG)
    except AdapterError:  # of a language model, whose reader says what is wrong
        return False
    return "_class_name" in config or _class_of(config) in _OF_TRANSFORMERS


def component_class(folder: Path) -> str:
    """Return the name of the class of the module in a folder; empty: its config says none.

    Raises:
        AdapterError: it has no config, or that cannot be read.
    """
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
