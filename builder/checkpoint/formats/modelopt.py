"""NVIDIA modelopt: FP8, NVFP4, and 4 bits with x multiplied by a factor of each channel.

https://github.com/NVIDIA/Model-Optimizer/blob/main/modelopt/torch/export/quant_utils.py
"""

from dataclasses import replace

import numpy as np
import torch

from trt_lora.builder.checkpoint.formats import float8
from trt_lora.builder.checkpoint.formats.stored_linear import (
    Format,
    StoredLinear,
    Weight,
    check_scales,
)
from trt_lora.builder.passes.codes import nvfp4
from trt_lora.builder.passes.codes.coded_weight import E4M3, CodedWeight, multiplied, unpacked

# The 16 values of E2M1 as E4M3; modelopt reads minus zero as zero.
_E2M1 = np.arange(16, dtype=np.uint8).view(nvfp4.E2M1).astype(E4M3).view(np.uint8)
_E2M1[8] = 0


def read(linear: StoredLinear) -> Weight:
    """Return the weight of a linear; it reads x as it is.

    Raises:
        ModelError: fields or tensors are not of this format, or contradict each other.
    """
    algorithm = linear.option("quant_algo", ("FP8", "NVFP4", "W4A16_AWQ"))
    if algorithm == "FP8":
        return float8.read(linear)
    both = linear.tensor("weight", torch.uint8)
    return _nvfp4(linear, both) if algorithm == "NVFP4" else _awq(linear, both)


def _nvfp4(linear: StoredLinear, both: torch.Tensor) -> Weight:
    """Codes [n, k / 2], the first of a byte in its low half, with scales of two parts."""
    codes = _E2M1[unpacked(both.numpy())]
    fine, unit = linear.scales("weight_scale"), linear.scales("weight_scale_2", 0)
    check_scales(linear, codes.shape, fine, 1, nvfp4.BLOCK)
    if codes.shape[1] % nvfp4.BLOCK:
        raise linear.refusal(f"weight has {codes.shape[1]} columns, no blocks of {nvfp4.BLOCK}")
    stored = linear.tensor("weight_scale", torch.float8_e4m3fn)
    parts = stored.view(torch.uint8).numpy().view(E4M3), unit.numpy()
    scales, x_scale = multiplied(*parts, np.float32), float8.scale_of_x(linear)
    return CodedWeight(8, nvfp4.BLOCK, codes, scales, is_float=True, x_scale=x_scale, parts=parts)


def _awq(linear: StoredLinear, both: torch.Tensor) -> Weight:
    """Codes [n / 2, k] with a sign, two rows in a byte."""
    pairs = torch.stack([both & 15, both >> 4], 1).reshape(-1, both.shape[1])
    weight = linear.coded(4, (pairs ^ 8).numpy(), linear.scales("weight_scale"))
    if "pre_quant_scale" not in linear.tensors:
        return weight
    factors, k = linear.tensor("pre_quant_scale", dims=1).float(), both.shape[1]
    if len(factors) != k or not factors.isfinite().all():
        raise linear.refusal(f"pre_quant_scale has {len(factors)} values, expected {k} finite ones")
    if isinstance(weight, torch.Tensor):
        return weight * factors
    return replace(weight, factors=factors.numpy())


FORMAT = Format(("weight_scale",), ("weight_scale_2", "pre_quant_scale", *float8.TENSORS), read)
