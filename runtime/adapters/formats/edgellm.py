"""TensorRT-Edge-LLM's processed adapters, and any safetensors file keyed by binding name.

A [k, r], B [r, n], the scale folded into B. Vectors [n] beside them, `<path>.lora_scale.weight` and
`<path>.lora_bias.weight`, are for our engines: TensorRT-Edge-LLM has none.
"""

import json
from pathlib import Path

from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.cast import Conversion
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.weight import Weight
from trt_lora.runtime.files.safetensors_file import SafetensorsFile, save_safetensors

PROCESSED_FILE = "processed_adapter_model.safetensors"
CONFIG_FILE = "config.json"


def adapter_from_safetensors(path: Path, file: SafetensorsFile) -> Adapter:
    """Return what such a file holds, as `tensorrt-edgellm-process-lora` writes one.

    Both spellings of the names are known, and an engine's own names.

    Raises:
        AdapterError: it holds nothing.
    """
    if not file.tensors:
        raise AdapterError(f"{path} holds no tensors; save the adapter again")
    weights = {t.name: Weight((t.name,), t.shape, t.dtype, t.read) for t in file.tensors}
    return Adapter(str(path), weights, base_fingerprint=file.fingerprint)


def save_edgellm(
    adapter: Adapter, directory: Path, dtype: str, fingerprint: str | None
) -> Conversion:
    """Write the file and the `config.json` beside it; Edge-LLM's runtime takes float16.

    Raises:
        AdapterError: a value leaves the range of `dtype`.
    """
    weights = adapter.named(BindingNames.EDGELLM)
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
