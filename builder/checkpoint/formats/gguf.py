"""GGUF's Q4_0, Q8_0 and Q6_K: rows of blocks, in whose bytes scales of half precision lie.

https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h (`block_q4_0`, ...) and
ggml-quants.c beside it (`dequantize_row_q4_0`, ...). A scale may be below 0, and of a block of tiny
values 0 beside any codes.
"""

import numpy as np
import torch

from trt_lora.builder.checkpoint.formats.stored_linear import Format, StoredLinear
from trt_lora.builder.passes.codes.coded_weight import CodedWeight, Codes, packed
from trt_lora.runtime.memory.dtypes import Array


def read(linear: StoredLinear) -> CodedWeight:
    """Return the weight of a linear; the end of its tensor's name states the type.

    Raises:
        ModelError: its bytes are no whole blocks, or a scale is infinite or NaN.
    """
    (kind,) = linear.tensors
    rows = linear.tensor(kind, torch.uint8).numpy()
    nbytes, weight_of = _KINDS[kind]
    with np.errstate(invalid="ignore"):  # infinite times 0, which is refused below
        weight = weight_of(rows.reshape(len(rows), -1, nbytes))
    if not np.isfinite(weight.scales).all():
        raise linear.refusal(f"{kind} has scales that are infinite or NaN")
    return weight


def _q4_0(blocks: Codes) -> CodedWeight:
    """A scale, and 16 bytes: first values in the low halves, then values in the high ones."""
    codes = _parts(blocks[:, :, 2:], 16, 4)
    return CodedWeight(4, 32, packed(_rows(codes)), _scales(blocks[:, :, :2]))


def _q8_0(blocks: Codes) -> CodedWeight:
    """A scale, and 32 signed bytes, here counted from the least one."""
    codes = np.bitwise_xor(blocks[:, :, 2:], 128)
    return CodedWeight(8, 32, _rows(codes), _scales(blocks[:, :, :2]))


def _q6_k(blocks: Codes) -> CodedWeight:
    """Twice 128 values: 4 bits in 64 bytes, 2 in 32; a signed factor for each 16; their scale."""
    low, high, factors, scale = np.split(blocks, [128, 192, 208], axis=-1)
    codes = np.bitwise_or(_parts(low, 64, 4), np.left_shift(_parts(high, 32, 2), 4))
    scales = _scales(scale)[:, :, None] * factors.view(np.int8).astype(np.float32)
    codes = np.add(codes, 128 - 32)  # the middle of 6 bits becomes that of 8
    return CodedWeight(8, 16, _rows(codes), scales.reshape(len(blocks), -1))


def _parts(packed_codes: Codes, width: int, bits: int) -> Codes:
    """Codes [n, blocks, values]: of `width` bytes first those in the lowest bits of each."""
    blocks = packed_codes.shape[:2]
    shifts = np.arange(0, 8, bits).astype(np.uint8)[:, None]
    parts = np.right_shift(packed_codes.reshape(*blocks, -1, 1, width), shifts)
    codes: Codes = np.bitwise_and(parts, (1 << bits) - 1).reshape(*blocks, -1)
    return codes


def _scales(halves: Codes) -> Array:
    """Scales [n, blocks] of their two bytes."""
    return np.ascontiguousarray(halves).view("<f2")[:, :, 0].astype(np.float32)


def _rows(codes: Codes) -> Codes:
    return np.ascontiguousarray(codes.reshape(len(codes), -1))


_KINDS = {"q4_0": (18, _q4_0), "q8_0": (34, _q8_0), "q6_k": (210, _q6_k)}  # bytes of a block
FORMAT = Format(tuple(_KINDS), (), read)
