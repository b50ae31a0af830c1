"""NVIDIA modelopt: FP8, NVFP4, and 4 bits with x multiplied by a factor of each channel.

https://github.com/NVIDIA/Model-Optimizer/blob/main/modelopt/torch/export/quant_utils.py
"""

from dataclasses import replace

import torch

from trt_lora.builder.checkpoint.formats import float8
from trt_lora.builder.checkpoint.formats.stored_linear import Format, StoredLinear, Weight, scaled
from trt_lora.builder.passes.coded_weight import unpacked

# E2M1: a sign, two bits of exponent, one of mantissa; modelopt reads minus zero as zero.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_MAGNITUDES, *(0 - value for value in _MAGNITUDES)])


def read(linear: StoredLinear) -> Weight:
    """Return the weight of a linear; it reads x as it is.

    Raises:
        ModelError: fields or tensors are not of this format, or contradict each other.
    """
    algorithm = linear.option("quant_algo", ("FP8", "NVFP4", "W4A16_AWQ"))
    if algorithm == "FP8":
        return float8.read(linear)
    both = linear.tensor("weight", torch.uint8)
    if algorithm == "NVFP4":
        scales = linear.scales("weight_scale") * linear.scales("weight_scale_2", 0)
        codes = torch.from_numpy(unpacked(both.numpy()))
        return scaled(linear, _E2M1[codes.int()], scales, 1, 16)
    return _awq(linear, both)


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
