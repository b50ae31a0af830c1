"""Check a base model by its config and its modules, before a weight is read."""

from dataclasses import dataclass, replace
from typing import Any

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checks.config_fields import check_fields, stated_positions
from trt_lora.builder.checks.encoder_decoder import check_options, choose_source_len, token_rules
from trt_lora.builder.checks.lengths import Lengths, choose_lengths
from trt_lora.builder.checks.weight_names import check_weight_names
from trt_lora.builder.config import BuildConfig
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.builder.targets import SiteList
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.runtime.manifest import TokenRules


@dataclass(frozen=True)
class CheckedModel:
    """Config, lengths, LoRA sites and size of a base model, before a weight is read."""

    checkpoint: Checkpoint
    config: Any  # transformers'
    lengths: Lengths
    sites: SiteList
    weight_bytes: int  # of what is exported, at least
    rules: TokenRules | None = None  # of an encoder-decoder's answers


def check_model(config: BuildConfig, lora: ResolvedLoRA) -> CheckedModel:
    """Return what the model says of itself.

    Raises:
        ConfigError: the model is too short for an option, is quantised already, or a target matches
            none of its linears.
        ModelError: there is no model, or none that can be built.
        BackendError: the extra `export` is not installed.
    """
    checkpoint = Checkpoint(config.model)
    check_fields(checkpoint)
    if config.quantize != "none" and (stated := checkpoint.quantisation):
        raise ConfigError(
            f"--quantize {config.quantize} would round twice: {config.model} is quantised by "
            f"{stated.method} already; leave it out"
        )
    check_options(config, checkpoint)
    choose_lengths(config, stated_positions(checkpoint.fields))
    check_weight_names(checkpoint, lora.targets)
    # torch and transformers take seconds: not for what the files tell by themselves.
    with extra("export", "reading a model"):
        from trt_lora.builder.checks import meta_model as meta
        from trt_lora.builder.checks.model_config import read_config
        from trt_lora.builder.checks.unsupported import check_supported

    model_config = read_config(checkpoint)
    model = meta.meta_model(model_config, config.dtype)
    check_supported(model)
    positions = meta.usable_positions(model)
    lengths, rules = choose_lengths(config, positions), None
    if checkpoint.is_encoder_decoder:
        rules = token_rules(checkpoint, model_config)
        source = choose_source_len(config, model_config, positions)
        lengths = replace(lengths, max_source_len=source)
    sites = meta.find_sites(model, lora.targets)
    size = meta.weight_bytes(model, config)
    if checkpoint.quantisation is not None:  # what may stay codes is known when it is read
        size = min(size, sum(weight.nbytes for weight in checkpoint.weights))
    return CheckedModel(checkpoint, model_config, lengths, sites, size, rules)
