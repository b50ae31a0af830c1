"""TensorRT-Edge-LLM's processed adapters: one safetensors file, A [k, r], B [r, n], scaled B."""

import json
from pathlib import Path

from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.cast import Conversion
from trt_lora.runtime.adapters.formats.named_safetensors import (
    adapter_from_safetensors,
    save_safetensors,
)
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.untrusted_file import file_inside

PROCESSED_FILE = "processed_adapter_model.safetensors"
CONFIG_FILE = "config.json"


def adapter_from_edgellm(directory: Path) -> Adapter:
    """Read what `tensorrt-edgellm-process-lora` or `save_edgellm` wrote.

    Raises:
        AdapterError: the file is damaged, or is a link that leads elsewhere.
    """
    return adapter_from_safetensors(file_inside(directory, PROCESSED_FILE))


def save_edgellm(
    adapter: Adapter, directory: Path, dtype: str, fingerprint: str | None
) -> Conversion:
    """Write the file and the `config.json` beside it; Edge-LLM's runtime takes float16.

    Raises:
        AdapterError: a value leaves the range of `dtype`.
    """
    weights: dict[str, Weight] = {}
    for path, pair in adapter.pairs().items():
        weights |= zip(BindingNames.EDGELLM.pair(path), pair, strict=True)
    tensors, conversions = pack_weights(weights, dict.fromkeys(weights, dtype), adapter.source)
    save_safetensors(tensors, directory / PROCESSED_FILE, fingerprint)
    rank = max(adapter.ranks.values())
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": adapter.base_model,
        "r": rank,
        "lora_alpha": rank,  # the scale is in B
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return Conversion.of_all(conversions.values())
