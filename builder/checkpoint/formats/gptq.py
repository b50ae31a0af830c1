"""GPTQ: words along k of codes [k, n], zeros packed along n, and the group of each value of k.

https://github.com/AutoGPTQ/AutoGPTQ/blob/main/auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py;
version 2 of the format (`gptq_v2`) stores zeros as they are, the first one less than they are.
"""

import torch

from trt_lora.builder.checkpoint.formats.stored_linear import Format, StoredLinear, Weight
from trt_lora.builder.passes.codes.coded_weight import Codes

_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # of the zeros that are stored, by checkpoint_format


def read(linear: StoredLinear) -> Weight:
    """Return the weight of a linear.

    Raises:
        ModelError: fields or tensors are not of this format, or contradict each other.
    """
    bits = linear.option("bits", (4, 8))
    offset = _OFFSETS[linear.option("checkpoint_format", tuple(_OFFSETS), "gptq")]
    codes = linear.words("qweight", bits, 0).T
    scales = linear.scales("scales").T
    zeros = linear.words("qzeros", bits, 1, offset).T
    groups = linear.tensor("g_idx", torch.int32, 1) if "g_idx" in linear.tensors else None
    _check_version(linear, bits, codes, zeros)
    return linear.coded(bits, codes, scales, zeros, groups)


def _check_version(linear: StoredLinear, bits: int, codes: Codes, zeros: Codes) -> None:
    """Refuse zeros of the other version: all values would move by a scale.

    Those of symmetric codes are known; of others, values of a weight are zero in the mean.
    """
    steps = float(codes.mean() - zeros.mean())
    is_symmetric = linear.fields.get("sym") is True
    if (is_symmetric and (zeros != 1 << bits - 1).any()) or (bits == 4 and abs(steps) > 0.5):
        raise linear.refusal(
            f"zeros are {zeros.min()} to {zeros.max()}, sym is {is_symmetric}, and the codes' mean "
            f"is {steps:.1f} above theirs: checkpoint_format may be that of the other version"
        )


FORMAT = Format(("qweight",), ("qzeros", "scales", "g_idx"), read)
