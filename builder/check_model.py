"""Check a base model by its config and its modules, before a weight is read."""

from trt_lora.builder.config import BuildConfig
from trt_lora.builder.lengths import choose_lengths
from trt_lora.builder.lora_plan import LoRAPlan
from trt_lora.builder.model_config import read_config
from trt_lora.builder.resolved import CheckedModel
from trt_lora.builder.unsupported import check_supported, check_type


def check_model(config: BuildConfig, lora: LoRAPlan) -> CheckedModel:
    """Return what the model says of itself.

    Raises:
        ConfigError: the model is too short for an option, or a target matches none of its linears.
        ModelError: there is no model, or none that can be built.
    """
    model_config = read_config(config.model)
    check_type(model_config)
    lengths = choose_lengths(config, model_config)
    # Importing transformers' models takes seconds: not for what the config alone tells.
    from trt_lora.builder.meta_model import find_sites, meta_model

    model = meta_model(model_config, config.dtype)
    check_supported(model)
    return CheckedModel(model_config, lengths, find_sites(model, lora.targets))
