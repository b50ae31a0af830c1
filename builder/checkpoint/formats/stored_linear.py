"""The tensors of one quantised linear as a checkpoint holds them, and the codes that they are."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trt_lora.builder.passes.codes.coded_weight import CodedWeight, Codes, packed
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import listed, shown

Weight = CodedWeight | torch.Tensor  # [n, k]; of floats where no operator multiplies by the codes

WORD = 32  # bits of the words that codes are packed in
_BLOCKS = (16, 256)  # the least and the most values of a block that ONNX Runtime multiplies by


@dataclass(frozen=True)
class StoredLinear:
    """Tensors of a linear, and what the checkpoint says of all of them."""

    path: str  # of the module
    tensors: Mapping[str, torch.Tensor]  # by the ends of their names, such as "qweight"
    fields: Mapping[str, Any]  # of the quantization_config

    def refusal(self, reason: str) -> ModelError:
        """Return the error of tensors that contradict each other."""
        return ModelError(f"{self.path}: {reason}; download or copy the model again")

    def tensor(self, name: str, dtype: torch.dtype | None = None, dims: int = 2) -> torch.Tensor:
        """Return a tensor.

        Args:
            name: the end of its name.
            dtype: that it must have; None: any float.
            dims: its number of dimensions.

        Raises:
            ModelError: it is missing, or another.
        """
        found = self.tensors.get(name)
        if found is None:
            raise self.refusal(f"{name} is missing beside {listed(sorted(self.tensors))}")
        is_type = found.is_floating_point() if dtype is None else found.dtype == dtype
        if not is_type or found.dim() != dims:
            expected = f"{dims} dimensions of {str(dtype or 'floats').removeprefix('torch.')}"
            own = str(found.dtype).removeprefix("torch.")
            raise self.refusal(f"{name} is {own} {[*found.shape]}, expected {expected}")
        return found

    def scales(self, name: str, dims: int = 2) -> torch.Tensor:
        """Return scales in float32.

        Raises:
            ModelError: one is negative, infinite or NaN.
        """
        scales = self.tensor(name, dims=dims).float()
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise self.refusal(f"{name} has scales that are negative, infinite or NaN")
        return scales

    def words(self, name: str, bits: int, axis: int, offset: int = 0) -> Codes:
        """Return the codes of 32-bit words [a, b], the lowest bits first, along an axis.

        Args:
            name: the end of the tensor's name.
            bits: of a code.
            axis: of the words.
            offset: that each code is to be raised by; a word of them overflows as one number.
        """
        words = self.tensor(name, torch.int32).numpy().view(np.uint32)
        words = words + np.uint32(sum(offset << shift for shift in range(0, WORD, bits)))
        mask = np.uint32((1 << bits) - 1)
        parts = [(words >> shift & mask).astype(np.uint8) for shift in range(0, WORD, bits)]
        sizes = [size * (len(parts) if at == axis else 1) for at, size in enumerate(words.shape)]
        return np.stack(parts, axis + 1).reshape(sizes)

    def unsigned(self, name: str, bits: int) -> Codes:
        """Return signed codes, a byte each, as they are counted from the least one.

        Raises:
            ModelError: one is beyond the range of its bits.
        """
        codes = self.tensor(name, torch.int8).numpy().astype(np.int16) + (1 << bits - 1)
        if ((codes < 0) | (codes >= 1 << bits)).any():
            raise self.refusal(f"{name} has codes beyond the range of {bits} bits")
        return codes.astype(np.uint8)

    def option(
        self,
        name: str,
        choices: tuple[Any, ...],
        default: Any = None,
        source: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return a field of the description, or of a part of it.

        Raises:
            ModelError: it is none of the choices.
        """
        value = (self.fields if source is None else source).get(name, default)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            read = " or ".join(map(repr, choices))
            raise self.refusal(f"{name} of its quantisation is {shown(value)}, and {read} is read")
        return value

    def coded(
        self,
        bits: int,
        codes: Codes,
        scales: torch.Tensor,
        zeros: Codes | None = None,
        groups: torch.Tensor | None = None,
    ) -> Weight:
        """Return the weight of codes; of floats where its blocks are none of the operator's.

        Args:
            bits: of a code.
            codes: [n, k], a byte each.
            scales: [n, groups].
            zeros: [n, groups], a byte each; None: the middle code.
            groups: [k], the group of each value of k; None: one behind the other.

        Raises:
            ModelError: shapes contradict each other.
        """
        (n, k), count = codes.shape, scales.shape[-1]
        zeros = np.full((n, count), 1 << bits - 1, np.uint8) if zeros is None else zeros
        if not len(scales) == n == len(zeros) or zeros.shape[1] != count or k % count:
            shapes = f"codes are {[n, k]}, scales {[*scales.shape]}, zeros {[*zeros.shape]}"
            raise self.refusal(f"{shapes}: these are no blocks of k")
        order = self._order(groups, k // count)
        codes = codes if order is None else codes[:, order]
        blocks = codes.reshape(n, count, -1)[scales.numpy() == 0]
        if (blocks != zeros[scales.numpy() == 0][:, None]).any():
            raise self.refusal("scales are 0 where codes are not")
        own = np.ascontiguousarray(codes)
        weight = CodedWeight(
            bits,
            k // count,
            packed(own) if bits == 4 else own,
            scales.numpy(),
            None if (zeros == 1 << bits - 1).all() else zeros,
            order,
        )
        block = math.gcd(k // count, _BLOCKS[1])
        if block < _BLOCKS[0]:
            return torch.from_numpy(weight.dequantised())
        return weight.split(block)

    def _order(self, groups: torch.Tensor | None, size: int) -> npt.NDArray[np.int64] | None:
        """Places in k of the codes, one group behind the other; None where they lie so."""
        if groups is None:
            return None
        order: npt.NDArray[np.int64] = np.argsort(groups.numpy(), kind="stable")
        expected = np.arange(len(order)) // size
        if not np.array_equal(groups.numpy()[order], expected):
            raise self.refusal(f"g_idx does not name every group of {size} values {size} times")
        return None if np.array_equal(order, np.arange(len(order))) else order


@dataclass(frozen=True)
class Format:
    """How linears of a format are found and read."""

    markers: tuple[str, ...]  # ends of names; a linear in codes has a tensor of one
    tensors: tuple[str, ...]  # those that it may have besides
    read: Callable[[StoredLinear], Weight]


def scaled(
    linear: StoredLinear, codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int
) -> torch.Tensor:
    """Return codes times scales, in float32.

    Args:
        linear: that they are of.
        codes: [n, k], of any dtype.
        scales: in float32, one for each block of rows x columns; the last blocks may be smaller.
        rows: of a block.
        columns: of a block.

    Raises:
        ModelError: there are more or fewer scales than blocks.
    """
    n, k = codes.shape
    check_scales(linear, (n, k), scales, rows, columns)
    full = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return codes.float() * full


def check_scales(
    linear: StoredLinear, shape: tuple[int, int], scales: torch.Tensor, rows: int, columns: int
) -> None:
    """Refuse scales that are not one for each block of rows x columns of a weight.

    Raises:
        ModelError: there are more or fewer.
    """
    n, k = shape
    if tuple(scales.shape) != (-(-n // rows), -(-k // columns)):
        shapes = f"scales are {[*scales.shape]} beside a weight {[n, k]}"
        raise linear.refusal(f"{shapes}, one for each {rows} x {columns} are expected")
