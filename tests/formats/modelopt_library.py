"""NVIDIA modelopt: FP8 and NVFP4 by its own tensors, its 4-bit AWQ by the formula."""

# pyright: reportMissingImports=false

import json
from functools import partial
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from formats.checks import Tensors, Weights, check_fixtures, check_made, tensors_of_linears
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
from transformers import AutoModelForCausalLM


def read(directory: Path) -> Weights:
    """Return the weights of a checkpoint, which read x as it is."""
    fields = json.loads((directory / "config.json").read_text())["quantization_config"]
    form = {"FP8": _fp8, "NVFP4": _nvfp4, "W4A16_AWQ": _awq}[fields["quant_algo"]]
    return {path: form(tensors) for path, tensors in tensors_of_linears(directory).items()}


def _fp8(tensors: Tensors) -> Any:
    codes = tensors["weight"]
    stored = FP8QTensor(codes.shape, torch.float32, codes)
    return stored.dequantize(torch.float32, scale=tensors["weight_scale"])


def _nvfp4(tensors: Tensors) -> Any:
    codes = tensors["weight"]  # [n, k / 2]
    stored = NVFP4QTensor(torch.Size((len(codes), 2 * codes.shape[1])), torch.float32, codes)
    scales = {"scale": tensors["weight_scale"], "double_scale": tensors["weight_scale_2"]}
    return stored.dequantize(torch.float32, block_sizes={-1: 16}, **scales)


def _awq(tensors: Tensors) -> torch.Tensor:
    """By the formula, because the library does not read what it exports.

    Bytes [n / 2, k] hold row 2 i in their low half and row 2 i + 1 in their high half, in two's
    complement; a code times weight_scale of its block of 128, times pre_quant_scale of its x.
    """
    both, scales = tensors["weight"].int(), tensors["weight_scale"].float()
    codes = torch.stack([both & 15, both >> 4], 1).flatten(0, 1)
    codes -= 16 * (codes > 7)
    weight = codes * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
    return weight * tensors["pre_quant_scale"].float() if "pre_quant_scale" in tensors else weight


def make(recipe: str, floats: Path, codes: Path) -> None:
    """Write a checkpoint by a recipe of the library; ranges of x are those of random tokens."""
    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    ids = torch.randint(model.config.vocab_size, (4, 32))
    mtq.quantize(model, getattr(mtq, recipe), lambda model: model(ids))
    export_hf_checkpoint(model, export_dir=str(codes))


if __name__ == "__main__":
    check_fixtures("nvidia-modelopt", read)
    for recipe in ("FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG", "INT4_AWQ_CFG"):
        check_made(recipe, partial(make, recipe), read)
