"""compressed-tensors: every scheme that we read, applied, compressed and decompressed by it."""

# pyright: reportMissingImports=false

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from formats.checks import Tensors, Weights, check_fixtures, check_made, tensors_of_linears
from transformers import AutoModelForCausalLM


def read(directory: Path) -> Weights:
    """Return the weights of a checkpoint."""
    fields = json.loads((directory / "config.json").read_text())["quantization_config"]
    known = fields.keys() & QuantizationConfig.model_fields.keys()  # the others are of the file
    config = QuantizationConfig.model_validate({name: fields[name] for name in known})
    (scheme,) = config.config_groups.values()
    form = BaseCompressor.get_value_from_registry(config.format)
    stored = tensors_of_linears(directory)
    return {path: form.decompress(_floats(ends), scheme)["weight"] for path, ends in stored.items()}


def _floats(tensors: Tensors) -> dict[str, torch.Tensor]:
    """It multiplies in the dtype of the scales; so these are made float32."""
    return {**tensors, "weight_scale": tensors["weight_scale"].float()}


def make(scheme: str, dtype: torch.dtype, floats: Path, codes: Path) -> None:
    """Write a checkpoint by one of the library's schemes."""
    model = AutoModelForCausalLM.from_pretrained(floats, dtype=dtype)
    config = QuantizationConfig(config_groups={scheme: ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _find_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(codes)
    compressor.update_config(str(codes))


def _find_scales(linear: Any) -> None:
    """From the smallest to the largest of each block; the library leaves that to its callers."""
    args, weight = linear.quantization_scheme.weights, linear.weight.detach()
    blocks = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    linear.weight_scale.data, linear.weight_zero_point.data = scale, zero


if __name__ == "__main__":
    check_fixtures("compressed-tensors", read)
    for scheme in ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC"):
        for dtype in (torch.float32, torch.bfloat16):
            check_made(f"{scheme} of {dtype}", partial(make, scheme, dtype), read)
