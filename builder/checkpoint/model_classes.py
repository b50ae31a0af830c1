"""Which of transformers' classes a base model is loaded as, by its type."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trt_lora.builder.checkpoint.checkpoint import ENCODER_DECODERS

_AUTO: Mapping[str, Any] = {"whisper": AutoModelForSpeechSeq2Seq}


def auto_class(model_type: str) -> Any:
    """Return the class that makes a model of a config, or loads one."""
    other: Any = AutoModelForSeq2SeqLM if model_type in ENCODER_DECODERS else AutoModelForCausalLM
    return _AUTO.get(model_type, other)


def class_names(model_type: str) -> tuple[str, ...]:
    """Return the names of the classes that a model of a type may be."""
    if model_type in ENCODER_DECODERS:
        return (ENCODER_DECODERS[model_type],)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)
