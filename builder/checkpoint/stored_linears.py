"""Read a quantised checkpoint: its linears one by one, and the tensors that are floats."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.formats import (
    awq,
    bitsandbytes,
    compressed_tensors,
    float8,
    gguf,
    gptq,
    modelopt,
)
from trt_lora.builder.checkpoint.formats.stored_linear import Format, StoredLinear, Weight
from trt_lora.builder.checkpoint.model_directory import NEXT_STEP
from trt_lora.builder.checkpoint.quantisation import Quantisation
from trt_lora.builder.checkpoint.weight_files import GGUF, SAFETENSORS, check_dense
from trt_lora.builder.model_errors import one_line

FORMATS: Mapping[str, Format] = {
    "awq": awq.FORMAT,
    "bitsandbytes": bitsandbytes.FORMAT,
    "compressed-tensors": compressed_tensors.FORMAT,
    "fbgemm_fp8": float8.FORMAT,
    "fp8": float8.FORMAT,
    "gguf": gguf.FORMAT,
    "gptq": gptq.FORMAT,
    "modelopt": modelopt.FORMAT,
}

_SHARE_X = ("q_proj", "k_proj", "v_proj")  # of one attention


@dataclass(frozen=True)
class StoredLinears:
    """The linears of a checkpoint that are in codes.

    Raises:
        ModelError: what is in codes is not of the format that the checkpoint states. `weights`
            raises it where the tensors of a linear contradict each other.
    """

    checkpoint: Checkpoint
    quantisation: Quantisation

    def __post_init__(self) -> None:
        """Look at the names, dtypes and shapes of the tensors."""
        names = [path.name for path in self.checkpoint.headers]
        if other := [name for name in names if not name.endswith((SAFETENSORS, GGUF))]:
            raise self.quantisation.refusal(f"codes are read of {SAFETENSORS}, not {other[0]}")
        if not self._homes:
            raise self.quantisation.refusal("no linear has the tensors of that")

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Yield the weight [n, k] of each linear, by its path, one at a time."""
        orders = dict[str, str]()
        for path in self.paths:
            weight = self.weight(path)
            self._check_order(path, weight, orders)
            yield path, weight

    @property
    def paths(self) -> Collection[str]:
        """The paths of the linears."""
        return self._homes.keys()

    def weight(self, path: str) -> Weight:
        """Return the weight [n, k] of a linear."""
        names = {f"{path}.{end}": end for end in self._homes[path]}
        tensors = {
            names[name]: tensor
            for file in sorted({*self._homes[path].values()})
            for name, tensor in self.checkpoint.read(file, names.__contains__)
        }
        read, fields = FORMATS[self.quantisation.method].read, self.quantisation.fields
        with one_line(f"{path} cannot be read", NEXT_STEP):  # tensors of any shape
            return read(StoredLinear(path, tensors, fields))

    def _check_order(self, path: str, weight: Weight, orders: dict[str, str]) -> None:
        """Refuse q, k and v with codes in different orders: each is that of the x they share.

        Args:
            path: of a linear.
            weight: its own.
            orders: the orders of the codes of each attention before.
        """
        attention, _, name = path.rpartition(".")
        if name not in _SHARE_X or isinstance(weight, torch.Tensor):
            return
        order = "" if weight.order is None else weight.order.tobytes().hex()
        if orders.setdefault(attention, order) != order:
            raise self.quantisation.refusal(
                f"g_idx of {path} is not that of the other linears that read the same x"
            )

    def nbytes(self, path: str) -> int:
        """Return the size of a linear's tensors in the files."""
        names = {f"{path}.{end}" for end in self._homes[path]}
        return sum(tensor.nbytes for tensor in self.checkpoint.weights if tensor.name in names)

    @cached_property
    def _homes(self) -> Mapping[str, Mapping[str, Path]]:
        """The file of each tensor of a linear, by the linear's path and the end of its name."""
        form, homes = FORMATS[self.quantisation.method], self.checkpoint.homes
        ends = (*form.markers, *form.tensors)
        paths = {
            name.removesuffix(f".{end}")
            for end in form.markers
            for name in homes
            if name.endswith(f".{end}")
        }
        return {
            path: {end: home for end in ends if (home := homes.get(f"{path}.{end}"))}
            for path in sorted(paths)
        }

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all tensors that are of such linears."""
        return frozenset(f"{path}.{end}" for path, homes in self._homes.items() for end in homes)


def stored_linears(checkpoint: Checkpoint) -> StoredLinears | None:
    """Return the linears of a checkpoint that are in codes; None: all its weights are floats.

    Raises:
        ModelError: it has codes that it does not state, or states others.
    """
    quantisation = checkpoint.quantisation
    found = None if quantisation is None else StoredLinears(checkpoint, quantisation)
    codes = frozenset[str]() if found is None else found.names
    check_dense(
        {
            path: [weight for weight in header if weight.name not in codes]
            for path, header in checkpoint.headers.items()
        }
    )
    return found


def float_tensors(
    checkpoint: Checkpoint, is_wanted: Callable[[str], object] = lambda _: True
) -> Iterator[tuple[Path, str, torch.Tensor]]:
    """Yield the tensors that are of no linear in codes, each with its file and its name."""
    found = stored_linears(checkpoint)
    codes = frozenset[str]() if found is None else found.names
    for path in checkpoint.headers:
        names = checkpoint.read(path, lambda name: name not in codes and is_wanted(name))
        yield from ((path, *item) for item in names)


def dense(weight: Weight) -> torch.Tensor:
    """Return a weight [n, k] in floats."""
    if isinstance(weight, torch.Tensor):
        return weight
    return torch.from_numpy(weight.dequantised())
