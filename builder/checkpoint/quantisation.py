"""What a checkpoint says of the codes that its weights are in; torch is not imported."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_lora.builder.checkpoint.model_directory import read_object
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import shown

# Those that `formats` reads.
METHODS = (
    *("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gguf", "gptq"),
    "modelopt",
)

_KEYS = ("quantization_config", "compression_config")
_MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class Quantisation:
    """The form of a checkpoint's weights, as one of its files states it."""

    method: str  # one of METHODS
    fields: Mapping[str, Any]
    path: Path  # of the file

    @property
    def scales_x(self) -> bool:
        """Whether linears read x divided by factors of each channel, which are in the weights."""
        return self.method == "awq" or "AWQ" in str(self.fields.get("quant_algo"))

    def refusal(self, reason: str) -> ModelError:
        """Return the error of a checkpoint that cannot be read."""
        return ModelError(
            f"{self.path}: the weights are quantised by {self.method}, and {reason}; pass the "
            "model as it was before, or save a dequantised copy"
        )


def stated_quantisation(config_path: Path, fields: Mapping[str, Any]) -> Quantisation | None:
    """Return what a config.json, or modelopt's file beside it, says of codes; None: nothing.

    Raises:
        ModelError: it names a method that is not read.
    """
    stated = next(_stated(fields), None)
    own = config_path.parent / _MODELOPT_FILE
    if stated is None and own.is_file():
        config_path, stated = own, _modelopt(read_object(own))
    if stated is None:
        return None
    is_object = isinstance(stated, Mapping)
    method = stated.get("quant_method") if is_object else None
    found = Quantisation(str(method or shown(stated)), stated if is_object else {}, config_path)
    if found.method not in METHODS:
        raise found.refusal(f"codes are read of {', '.join(METHODS)}")
    return found


def _stated(fields: Mapping[str, Any]) -> Iterator[Any]:
    """The descriptions of codes, of the model and of its parts."""
    for part in (fields, *(value for value in fields.values() if isinstance(value, Mapping))):
        yield from (part[key] for key in _KEYS if part.get(key))


def _modelopt(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the file of modelopt says, with the name of its method as config.json has it."""
    stated = fields.get("quantization")
    return {"quant_method": "modelopt", **stated} if isinstance(stated, Mapping) else None
