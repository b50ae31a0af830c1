"""The transformers config of a base model, refused where transformers would not do what it says."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, __version__
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.model_classes import class_names
from trt_lora.builder.checkpoint.model_directory import NEXT_STEP
from trt_lora.builder.model_errors import one_line
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import shown

_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_ROPE_TYPES = ("default", "axial", *ROPE_INIT_FUNCTIONS)


def read_config(checkpoint: Checkpoint) -> Any:
    """Return the transformers config of a language model; its class is not imported.

    Raises:
        ModelError: it is of another kind, or its small files are damaged.
    """
    path = checkpoint.config_path
    _check_model_type(path, checkpoint.fields)
    with (
        one_line(f"{path} is not what transformers expects", f"correct it, or {NEXT_STEP}"),
        suppress_output(),
    ):
        config = AutoConfig.from_pretrained(checkpoint.directory, trust_remote_code=False)
        _check_architecture(path, config)
        _check_choices(path, config)
        checkpoint.pad_token_id(config)  # checks the stop tokens too
    return config


def _check_model_type(path: Path, fields: Mapping[str, Any]) -> None:
    """Refuse a type of model that transformers does not have."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        own = ", and code that a model brings along (auto_map) is never run"
        raise ModelError(
            f"{path}: model_type is {shown(model_type)}, which transformers {__version__} does not "
            f"have{own if 'auto_map' in fields else ''}; pass a model that it has"
        )


def _check_architecture(path: Path, config: Any) -> None:
    """Refuse what is not the causal language model that transformers would make of it."""
    named = config.architectures if isinstance(config.architectures, list) else []
    names = [str(name) for name in named]
    made = class_names(config.model_type)
    if not set(names) & set(made):
        raise ModelError(
            f"{path.parent} holds {', '.join(names) or 'a model without architectures'}, not a "
            f"causal language model of model_type {config.model_type}; expected "
            f"{' or '.join(made) or 'a class such as LlamaForCausalLM'}"
        )


def _check_choices(path: Path, config: Any) -> None:
    """Refuse activations and rotary embeddings that transformers does not have."""
    config = config.get_text_config(decoder=True)
    for key in _ACTIVATIONS:
        name = getattr(config, key, None)
        if isinstance(name, str) and name not in ACT2FN:
            raise ModelError(
                f"{path}: {key} is {shown(name)}, an activation that transformers does not have; "
                f"it has {', '.join(sorted(ACT2FN))}"
            )
    for rope in ropes(getattr(config, "rope_parameters", None)):
        _check_rope(path, rope)


def _check_rope(path: Path, rope: Mapping[str, Any]) -> None:
    kind, theta, factor = (rope.get(key) for key in ("rope_type", "rope_theta", "factor"))
    if kind not in _ROPE_TYPES:
        raise ModelError(
            f"{path}: rope_type is {shown(kind)}; transformers has {', '.join(_ROPE_TYPES)}"
        )
    if theta is not None and not (_is_number(theta) and theta > 0):
        raise ModelError(f"{path}: rope_theta is {shown(theta)}, expected a number above 0")
    if kind == "default" and factor not in (None, 1):
        raise ModelError(
            f"{path}: rope_scaling has the factor {shown(factor)} and no rope_type, so it would "
            f"do nothing; add one of {', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    if kind != "default" and factor is not None and not _is_number(factor):
        raise ModelError(f"{path}: the rope's factor is {shown(factor)}, expected a number")


def ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rope parameters of every type of layer, or those of all."""
    if isinstance(parameters, Mapping):
        nested = [value for value in parameters.values() if isinstance(value, Mapping)]
        yield from nested or [parameters]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
