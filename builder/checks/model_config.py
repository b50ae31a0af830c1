"""Read and validate a base model's config without importing its model class."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from trt_lora.builder.checkpoint.generation_config import pad_token_id
from trt_lora.builder.checkpoint.model_directory import CONFIG_FILE, NEXT_STEP
from trt_lora.builder.checks.config_choices import (
    check_architecture,
    check_choices,
    check_model_type,
)
from trt_lora.builder.checks.config_fields import read_fields
from trt_lora.builder.model_errors import one_line
from trt_lora.builder.suppress_output import suppress_output


def read_config(directory: Path) -> Any:
    """Return the transformers config of a causal language model; reads no weights.

    Raises:
        ModelError: there is no model, it is of another kind, or its small files are damaged.
    """
    path = directory / CONFIG_FILE
    check_model_type(path, read_fields(directory))
    with (
        one_line(f"{path} is not what transformers expects", f"correct it, or {NEXT_STEP}"),
        suppress_output(),
    ):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        check_architecture(path, config)
        check_choices(path, config)
        pad_token_id(directory, config)  # checks the stop tokens too
    return config
