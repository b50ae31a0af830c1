"""FP8 weights with a scale for the whole, for each row, or for squares of 128 x 128.

https://github.com/deepseek-ai/DeepSeek-V3/blob/main/inference/kernel.py (`weight_dequant`) and
https://github.com/pytorch/FBGEMM for rows. Squares are no blocks of a row, so they become floats.
One scale of x, where there is one, was found on a text: products read x rounded by it.
"""

import numpy as np
import torch

from trt_lora.builder.checkpoint.formats.stored_linear import (
    Format,
    StoredLinear,
    Weight,
    check_scales,
    scaled,
)
from trt_lora.builder.passes.codes.coded_weight import CodedWeight
from trt_lora.plugins.messages import shown
from trt_lora.runtime.memory.dtypes import Array

_X_SCALES = ("input_scale", "activation_scale")
# The others quantise the cache, or bound scales of x that each token finds: here both stay floats.
TENSORS = ("weight", *_X_SCALES, "input_scale_ub", "k_scale", "v_scale", "output_scale")
_SCALES = ("weight_scale_inv", "weight_scale")  # the first is a factor too, whatever its name says


def read(linear: StoredLinear) -> Weight:
    """Return the weight of a linear; in squares it is of floats.

    Raises:
        ModelError: tensors are not of this format, or contradict each other.
    """
    name = next(name for name in _SCALES if name in linear.tensors)
    weight, (n, k) = linear.tensor("weight", torch.float8_e4m3fn), linear.tensors["weight"].shape
    if weight.isnan().any():
        raise linear.refusal("weight has NaN values")
    scales = linear.scales(name, linear.tensors[name].dim())
    rows, columns = linear.fields.get("weight_block_size") or (n if scales.numel() == 1 else 1, k)
    scales = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    if columns < k or 1 < rows < n:
        return scaled(linear, weight, scales, rows, columns)
    check_scales(linear, (n, k), scales, rows, columns)
    scales = scales.expand(n, 1).contiguous()
    if weight[scales[:, 0] == 0].float().any():
        raise linear.refusal(f"{name} has scales that are 0 where codes are not")
    codes, x_scale = weight.view(torch.uint8).numpy(), scale_of_x(linear)
    return CodedWeight(8, k, codes, scales.numpy(), is_float=True, x_scale=x_scale)


def scale_of_x(linear: StoredLinear) -> Array | None:
    """Return the scale of x; None: each token has its own, or x stays as it is.

    Raises:
        ModelError: it is no number above 0.
    """
    name = next((name for name in _X_SCALES if name in linear.tensors), None)
    if name is None:
        return None
    scale = linear.tensor(name, dims=linear.tensors[name].dim()).float().numpy()
    if scale.size != 1 or not np.isfinite(scale).all() or not (scale > 0).all():
        raise linear.refusal(f"{name} is {shown(scale.tolist())}, expected one number above 0")
    return scale.reshape(())


FORMAT = Format(_SCALES, TENSORS, read)
