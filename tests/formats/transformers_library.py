"""transformers: FP8 by squares through its own conversion, and FBGEMM's FP8 by the formula."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from formats.checks import Tensors, Weights, check_fixtures, check_made, tensors_of_linears
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize


def read(directory: Path) -> Weights:
    """Return the weights of a checkpoint."""
    return {path: _weight(tensors) for path, tensors in tensors_of_linears(directory).items()}


def _weight(tensors: Tensors) -> Any:
    """Squares by the library, rows of FBGEMM by the formula: a code times weight_scale [n, 1].

    It does not dequantise rows, and fbgemm_gpu has nothing for a CPU.
    """
    if "weight_scale" in tensors:
        return tensors["weight"].float() * tensors["weight_scale"]
    dequantise: Any = Fp8Dequantize
    two = tensors["weight"], tensors["weight_scale_inv"]
    return dequantise(None)._dequantize_one(*two, torch.float32)


def make(block: int, floats: Path, codes: Path) -> None:
    """Write a checkpoint in FP8 with a scale for each square."""
    config = FineGrainedFP8Config(weight_block_size=(block, block))
    quantise: Any = Fp8Quantize
    convert = quantise(SimpleNamespace(quantization_config=config)).convert
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(floats / "model.safetensors").items():
        one = {name: tensor}
        tensors |= convert(one) if name.endswith("_proj.weight") else one
    model = AutoConfig.from_pretrained(floats)
    model.quantization_config = config.to_dict()
    model.save_pretrained(codes)
    save_file(tensors, codes / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    check_fixtures("transformers", read)
    for block in (32, 64):
        check_made(f"squares of {block}", partial(make, block), read)
