"""GGUF's Q4_0, Q8_0 and Q6_K: rows of blocks, in whose bytes scales of half precision lie.

https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h (`block_q4_0`, ...) and
ggml-quants.c beside it (`dequantize_row_q4_0`, ...). A scale may be below 0, and of a block of tiny
values 0 beside any codes.
"""

import numpy as np
import torch

from trt_lora.builder.checkpoint.formats.stored_linear import Format, StoredLinear
from trt_lora.builder.passes.coded_weight import CodedWeight, Codes, packed
from trt_lora.runtime.memory.dtypes import Array


def read(linear: StoredLinear) -> CodedWeight:
    """Return the weight of a linear; the end of its tensor's name states the type.

    Raises:
        ModelError: its bytes are no whole blocks, or a scale is infinite or NaN.
    """
    (kind,) = linear.tensors
    rows = linear.tensor(kind, torch.uint8).numpy()
    nbytes, weight_of = _KINDS[kind]
    weight = weight_of(rows.reshape(len(rows), -1, nbytes))
    if not np.isfinite(weight.scales).all():
        raise linear.refusal(f"{kind} has scales that are infinite or NaN")
    return weight


def _q4_0(blocks: Codes) -> CodedWeight:
    """A scale, and 16 bytes: first values in the low halves, then values in the high ones."""
    both = blocks[:, :, 2:]
    codes = np.concatenate([both & 15, both >> 4], axis=-1)
    return CodedWeight(4, 32, packed(_rows(codes)), _scales(blocks[:, :, :2]))


def _q8_0(blocks: Codes) -> CodedWeight:
    """A scale, and 32 signed bytes, here counted from the least one."""
    return CodedWeight(8, 32, _rows(blocks[:, :, 2:] ^ 128), _scales(blocks[:, :, :2]))


def _q6_k(blocks: Codes) -> CodedWeight:
    """Twice 128 values: 4 bits in 64 bytes, 2 in 32; a signed factor for each 16; their scale."""
    low, high, factors, scale = np.split(blocks, [128, 192, 208], axis=-1)
    halves = (*blocks.shape[:2], 2, 1)
    low = low.reshape(*halves, 64) >> np.array([[0], [4]], np.uint8) & 15
    high = high.reshape(*halves, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    codes = low.reshape(*blocks.shape[:2], 256) | high.reshape(*blocks.shape[:2], 256) << 4
    scales = _scales(scale)[:, :, None] * factors.view(np.int8).astype(np.float32)
    return CodedWeight(8, 16, _rows(codes + np.uint8(128 - 32)), scales.reshape(len(blocks), -1))


def _scales(halves: Codes) -> Array:
    """Scales [n, blocks] of their two bytes."""
    return np.ascontiguousarray(halves).view("<f2")[:, :, 0].astype(np.float32)


def _rows(codes: Codes) -> Codes:
    return np.ascontiguousarray(codes.reshape(len(codes), -1))


_KINDS = {"q4_0": (18, _q4_0), "q8_0": (34, _q8_0), "q6_k": (210, _q6_k)}  # bytes of a block
FORMAT = Format(tuple(_KINDS), (), read)
