"""Checks of a base model's directory and its small files."""

import os
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import AdapterError, ModelError
from trt_lora.plugins.messages import did_you_mean
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.generation.parameters.default_sampling import GENERATION_FILE

CONFIG_FILE = "config.json"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
NEXT_STEP = "download or copy the model again"

_ADAPTER_FILE = "adapter_config.json"
_POINTER = b"version https://git-lfs.github.com/spec/v1"
_MAX_JSON_BYTES = 64 << 20  # an index names every weight of its shards
_EXPECTED = "Pass the folder that save_pretrained wrote or the model hub downloaded"


def check_directory(directory: Path) -> None:
    """Refuse what is not the directory of a base model, or what a download left unfinished.

    Raises:
        ModelError: it is; the message says what to pass instead.
    """
    try:
        names = set(os.listdir(directory))
    except NotADirectoryError as error:
        raise ModelError(f"{_shown(directory)} is not a directory. {_beside(directory)}") from error
    except FileNotFoundError as error:
        meant = did_you_mean(directory.name, _models_beside(directory))
        raise ModelError(f"{directory} does not exist{meant or _download(directory)}") from error
    except (OSError, ValueError) as error:  # no permission, too long, a zero byte
        raise ModelError(f"{_shown(directory)} cannot be read: {_reason(error)}") from error
    if _ADAPTER_FILE in names:
        raise ModelError(
            f"{directory} has an {_ADAPTER_FILE}, so it holds an adapter, which transformers would "
            "make part of the model. Pass the base model's directory, without adapter files, and "
            "load the adapter at run time"
        )
    if CONFIG_FILE not in names:
        raise ModelError(
            f"{directory} has no {CONFIG_FILE}: it is not a model directory. {_below(directory)}"
        )
    for name in names & {CONFIG_FILE, GENERATION_FILE, *TEXT_FILES}:
        check_content(directory / name)


def check_content(path: Path) -> None:
    """Refuse a file that cannot be read, is empty, or stands for one that Git LFS did not fetch.

    Raises:
        ModelError: it is such a file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {_reason(error)}; {NEXT_STEP}") from error
    if start == _POINTER:
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent}"
        )
    if not start:
        raise ModelError(f"{path} is empty; {NEXT_STEP}")


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of the model.

    Raises:
        ModelError: the file is missing, too large, or holds no JSON object.
    """
    try:
        return read_json(path, _MAX_JSON_BYTES)
    except AdapterError as error:
        raise ModelError(f"{error}; correct it, or {NEXT_STEP}") from error


def _beside(path: Path) -> str:
    """The directory of a file that was passed in its place."""
    return f"Pass {path.parent}" if (path.parent / CONFIG_FILE).is_file() else _EXPECTED


def _below(directory: Path) -> str:
    """The directory that was meant, where it is one level down or in the hub's cache."""
    snapshots = (*directory.glob(f"snapshots/*/{CONFIG_FILE}"), *directory.glob(f"*/{CONFIG_FILE}"))
    return f"Pass {snapshots[0].parent}" if snapshots else _EXPECTED


def _models_beside(path: Path) -> list[str]:
    """The names of models in the folder that a path is in."""
    try:
        return [found.parent.name for found in path.parent.glob(f"*/{CONFIG_FILE}")]
    except OSError:  # a folder that may not be read
        return []


def _download(path: Path) -> str:
    if path.is_absolute() or len(path.parts) != 2:
        return f". {_EXPECTED}"
    return f". If it is a name on the model hub: hf download {path} --local-dir {path.name}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _shown(path: Path) -> str:
    return f"{path!s:.200}"
