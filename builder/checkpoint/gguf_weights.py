"""The weights of a GGUF file under names of transformers, and with rows as they were trained.

https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py (`LlamaModel.permute`) moves
the rows of q and k.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_lora.builder.checkpoint.gguf_config import check_config, heads_of_moved_rows, refusal
from trt_lora.builder.checkpoint.gguf_file import FLOATS, GgufFile, GgufTensor, read_gguf
from trt_lora.builder.checkpoint.gguf_names import COMPUTED, EMBEDDING, HEAD, transformers_name
from trt_lora.builder.checkpoint.quantisation import Quantisation
from trt_lora.builder.checkpoint.weight_files import StoredWeight
from trt_lora.plugins.messages import shown

if TYPE_CHECKING:  # torch takes seconds to import, and headers need none
    import torch

_CODES = "U8"  # dtype of the bytes of rows
_OF_ROWS = ("Q8_0", "Q6_K")  # 8 bits, whose codes an embedding reads, too


@dataclass(frozen=True)
class GgufWeights:
    """The weights of a model; of codes a name ends in their type, such as `lm_head.q8_0`.

    Codes are bytes [n, bytes of a row]. An embedding in codes becomes floats, but where the head
    is tied to it: then 8 bits are the head's.

    Raises:
        ModelError: a tensor is of no such model, or in codes that it cannot have.
    """

    file: GgufFile
    moved: Mapping[str, int]  # heads in which rows were moved, by names of linears

    def __post_init__(self) -> None:
        """Look at names and shapes."""
        for own in self._sources.values():
            heads, shape = self._heads(own), self.file.tensors[own].shape
            if heads is not None and shape[0] % (2 * heads):
                raise refusal(self.file, f"{own} {[*shape]} is not of {heads} heads in halves")

    @property
    def quantisation(self) -> Quantisation | None:
        """The form of its linears; None: they are floats."""
        is_coded = any(weight.dtype == _CODES for weight in self.header)
        return Quantisation("gguf", {}, self.file.path) if is_coded else None

    @cached_property
    def header(self) -> tuple[StoredWeight, ...]:
        """What it holds, under names of transformers."""
        return tuple(self._sources)

    def read(self, is_wanted: Callable[[str], object]) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield weights, one at a time, by name."""
        for weight, own in self._sources.items():
            if is_wanted(weight.name):
                yield weight.name, self._tensor(weight, own)

    def _tensor(self, weight: StoredWeight, own: str) -> "torch.Tensor":
        import torch

        tensor = self.file.tensors[own]
        mapped = np.memmap(self.file.path, np.uint8, "r", tensor.start, tensor.byte_shape)
        values = torch.from_numpy(np.array(mapped))
        if tensor.type in FLOATS:
            dtypes = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
            values = values.view(dtypes[tensor.type])
        elif weight.dtype != _CODES:
            values = _floats(weight.name, tensor.type, values)
        heads = self._heads(own)
        return values if heads is None else _with_rows_back(values, heads)

    @cached_property
    def _sources(self) -> Mapping[StoredWeight, str]:
        """The name in the file of each weight."""
        tensors = self.file.tensors.items()
        return {self._entry(own, each): own for own, each in tensors if own not in COMPUTED}

    def _entry(self, own: str, tensor: GgufTensor) -> StoredWeight:
        name = transformers_name(own)
        if name is None:
            raise refusal(self.file, f"it has {shown(own)}, which no model that is read has")
        if tensor.type in FLOATS:
            return StoredWeight(name, tensor.type, tensor.shape)
        path, _, end = name.rpartition(".")
        if len(tensor.shape) != 2 or end != "weight":
            shape = [*tensor.shape]
            raise refusal(self.file, f"{own} {shape} is {tensor.type}, as matrices alone can be")
        if own == EMBEDDING:
            if HEAD in self.file.tensors or tensor.type not in _OF_ROWS:
                return StoredWeight(name, "F32", tensor.shape)
            path = "lm_head"
        return StoredWeight(f"{path}.{tensor.type.lower()}", _CODES, tensor.byte_shape)

    def _heads(self, own: str) -> int | None:
        return self.moved.get(own.split(".")[-2])


def gguf_weights(path: Path, fields: Mapping[str, Any]) -> GgufWeights:
    """Read the header of a GGUF file.

    Args:
        path: of the file.
        fields: of the config.json beside it.

    Raises:
        ModelError: it is damaged, or its model is not read, or another than that of config.json.
    """
    file = read_gguf(path)
    check_config(file, fields)
    return GgufWeights(file, heads_of_moved_rows(file))


def _with_rows_back(rows: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Rows [n, ..] whose halves lie one behind the other in each head; the file has pairs."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _floats(name: str, kind: str, rows: "torch.Tensor") -> "torch.Tensor":
    import torch

    from trt_lora.builder.checkpoint.formats import gguf
    from trt_lora.builder.checkpoint.formats.stored_linear import StoredLinear

    weight = gguf.read(StoredLinear(name, {kind.lower(): rows}, {}))
    return torch.from_numpy(weight.dequantised())
