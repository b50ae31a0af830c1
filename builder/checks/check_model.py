"""Check a base model by its config and its modules, before a weight is read."""

from dataclasses import dataclass
from typing import Any

from trt_lora.builder.checks.config_fields import read_fields, stated_positions
from trt_lora.builder.checks.lengths import Lengths, choose_lengths
from trt_lora.builder.checks.weight_names import check_weight_names
from trt_lora.builder.config import BuildConfig
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.builder.targets import SiteList
from trt_lora.plugins.extras import extra


@dataclass(frozen=True)
class CheckedModel:
    """Config, lengths, LoRA sites and size of a base model, before a weight is read."""

    config: Any  # transformers'
    lengths: Lengths
    sites: SiteList
    weight_bytes: int  # of what is exported, in the engine's dtype


def check_model(config: BuildConfig, lora: ResolvedLoRA) -> CheckedModel:
    """Return what the model says of itself.

    Raises:
        ConfigError: the model is too short for an option, or a target matches none of its linears.
        ModelError: there is no model, or none that can be built.
        BackendError: the extra `export` is not installed.
    """
    fields = read_fields(config.model)
    choose_lengths(config, stated_positions(fields))
    check_weight_names(config.model, fields, lora.targets)
    # torch and transformers take seconds: not for what the files tell by themselves.
    with extra("export", "reading a model"):
        from trt_lora.builder.checks.meta_model import find_sites, meta_model, weight_bytes
        from trt_lora.builder.checks.model_config import read_config
        from trt_lora.builder.checks.positions import usable_positions
        from trt_lora.builder.checks.unsupported import check_supported

    model_config = read_config(config.model)
    model = meta_model(model_config, config.dtype)
    check_supported(model)
    lengths = choose_lengths(config, usable_positions(model))
    return CheckedModel(model_config, lengths, find_sites(model, lora.targets), weight_bytes(model))
