"""bitsandbytes: nf4 and fp4 through a table of 16 values, int8 by rows.

https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/functional.py:
`QuantState` (its JSON has shape and sizes of blocks), `dequantize_4bit`, `int8_vectorwise_dequant`.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch

from trt_lora.builder.checkpoint.formats.stored_linear import Format, StoredLinear, Weight

_STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_PER_BYTE = 1 / 127  # of int8, whose largest value is SCB


def read(linear: StoredLinear) -> Weight:
    """Return the weight of a linear.

    Raises:
        ModelError: tensors are not of this format, or contradict each other.
    """
    if "SCB" not in linear.tensors:
        return _four_bits(linear)
    scales = linear.scales("SCB", 1)[:, None] * torch.tensor(_PER_BYTE, dtype=torch.float32)
    return linear.coded(8, linear.unsigned("weight", 8), scales)


def _four_bits(linear: StoredLinear) -> torch.Tensor:
    state = _state(linear)
    shape, block = state["shape"], state["blocksize"]
    both = linear.tensor("weight", torch.uint8).reshape(-1)
    if 2 * len(both) != math.prod(shape):
        raise linear.refusal(f"weight has {2 * len(both)} codes, and its shape is {shape}")
    codes = torch.stack([both >> 4, both & 15], 1).reshape(-1, block)  # the first in the high half
    values = linear.tensor("weight.quant_map", torch.float32, 1)[codes.int()]
    return (values * _largest(linear, state, len(codes))[:, None]).reshape(shape)


def _largest(linear: StoredLinear, state: Mapping[str, Any], count: int) -> torch.Tensor:
    """The largest value of each block of codes, of 8-bit codes itself where these are nested."""
    name = "weight.absmax"
    if "nested_offset" not in state:
        largest = linear.scales(name, 1)
    else:
        codes = linear.tensor(name, torch.uint8, 1)
        values = linear.tensor("weight.nested_quant_map", torch.float32, 1)[codes.int()]
        outer = linear.scales("weight.nested_absmax", 1)
        outer = outer.repeat_interleave(state["nested_blocksize"])[: len(codes)]
        largest = values * outer + state["nested_offset"]
    if len(largest) != count:
        raise linear.refusal(f"{name} has {len(largest)} values for {count} blocks")
    return largest


def _state(linear: StoredLinear) -> Mapping[str, Any]:
    name = next(name for name in _STATES if name in linear.tensors)
    try:
        state: Mapping[str, Any] = json.loads(bytes(linear.tensor(name, torch.uint8, 1).tolist()))
        if [type(size) for size in state["shape"]] == [int, int] and state["blocksize"] > 0:
            return state
    except (ValueError, KeyError, TypeError):
        pass
    raise linear.refusal(f"{name} does not hold bitsandbytes' description of the weight")


_TENSORS = (
    *("weight", "weight_format", "weight.quant_map"),
    *("weight.absmax", "weight.nested_absmax", "weight.nested_quant_map"),
)
FORMAT = Format((*_STATES, "SCB"), _TENSORS, read)
