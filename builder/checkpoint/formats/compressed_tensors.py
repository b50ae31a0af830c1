"""compressed-tensors: integers packed in words or not, and FP8; blocks, rows or all of a weight.

https://github.com/vllm-project/compressed-tensors/tree/main/src/compressed_tensors/compressors
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from trt_lora.builder.checkpoint.formats import float8
from trt_lora.builder.checkpoint.formats.stored_linear import Format, StoredLinear, Weight
from trt_lora.builder.passes.codes.coded_weight import Codes

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")


def read(linear: StoredLinear) -> Weight:
    """Return the weight of a linear.

    Raises:
        ModelError: fields or tensors are not of this format, or contradict each other.
    """
    linear.option("format", _FORMATS)
    group = _group(linear)
    stated = group["weights"]
    if stated.get("type") == "float":
        return float8.read(linear)
    bits = linear.option("num_bits", (4, 8), source=stated)
    scales = linear.scales("weight_scale")
    codes, zeros, groups = _codes(linear, bits), _zeros(linear, bits), None
    if "weight_g_idx" in linear.tensors:
        groups = linear.tensor("weight_g_idx", linear.tensors["weight_g_idx"].dtype, 1)
    weight = linear.coded(bits, codes, scales, zeros, groups)
    if bits == 4 or isinstance(weight, torch.Tensor) or not _has_scale_of_x(linear, group):
        return weight
    return replace(weight, x_scale=float8.scale_of_x(linear))


def _has_scale_of_x(linear: StoredLinear, group: Mapping[str, Any]) -> bool:
    """Whether x is to have codes of 8 bits with a scale of the file, and 0 as their zero."""
    x, zero = group.get("input_activations") or {}, linear.tensors.get("input_zero_point")
    is_static = not x.get("dynamic") and (x.get("type"), x.get("num_bits")) == ("int", 8)
    return is_static and (zero is None or not bool(zero.any()))


def _group(linear: StoredLinear) -> Mapping[str, Any]:
    """What is said of weights and of x, the same for all."""
    groups = linear.fields.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    if len(groups) != 1 or not isinstance(groups[0].get("weights"), Mapping):
        raise linear.refusal(f"config_groups has {len(groups)} forms of weights, and one is read")
    group: Mapping[str, Any] = groups[0]
    return group


def _codes(linear: StoredLinear, bits: int) -> Codes:
    if "weight_packed" not in linear.tensors:
        return linear.unsigned("weight", bits)
    n, k = linear.tensor("weight_shape", torch.int64, 1).tolist()
    codes = linear.words("weight_packed", bits, 1)
    if len(codes) != n or not 0 <= codes.shape[1] - k < 32 // bits:
        raise linear.refusal(f"weight_shape is {[n, k]}, weight_packed has {[*codes.shape]} codes")
    return codes[:, :k]


def _zeros(linear: StoredLinear, bits: int) -> Codes | None:
    name = "weight_zero_point"
    if name not in linear.tensors:
        return None
    if linear.tensors[name].dtype == torch.int8:
        return linear.unsigned(name, bits)
    return linear.words(name, bits, 0)[: len(linear.tensors["weight_scale"])]


_TENSORS = (
    *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("input_zero_point", "k_zero_point", "v_zero_point", *float8.TENSORS),
)
FORMAT = Format(("weight_scale",), _TENSORS, read)
