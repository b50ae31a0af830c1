"""The weights of a GGUF file as those of a Hugging Face model: their names, and the order of rows.

https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py has the names,
convert_hf_to_gguf.py beside it (`LlamaModel.permute`) the rows of q and k, which are put back here.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_lora.builder.checkpoint.gguf_file import FLOATS, GgufFile, GgufTensor, read_gguf
from trt_lora.builder.checkpoint.quantisation import Quantisation
from trt_lora.builder.checkpoint.weight_files import StoredWeight
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import shown

if TYPE_CHECKING:  # torch takes seconds to import, and headers need none
    import torch

# model_type in config.json, by general.architecture.
_MODEL_TYPES = {"llama": ("llama", "mistral"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)}
_PERMUTED = ("llama",)
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]*)\.)?(\w+)\.(weight|bias)")
_COMPUTED = ("rope_freqs.weight",)  # of config.json
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ROW_TYPES = ("Q8_0", "Q6_K")  # whose codes a tied embedding reads, too


@dataclass(frozen=True)
class GgufWeights:
    """The weights of a model, in codes under names with the type at the end: `lm_head.q8_0`.

    Raises:
        ModelError: the file's model is not read, or another than that of config.json.
    """

    file: GgufFile
    fields: Mapping[str, Any]  # of config.json

    def __post_init__(self) -> None:
        """Compare what both say, and look at names and shapes."""
        types, stated = _MODEL_TYPES.get(self._architecture), self.fields.get("model_type")
        if types is None:
            choices = ", ".join(_MODEL_TYPES)
            raise self._refusal(f"its architecture is {self._architecture}, and {choices} are read")
        if stated not in types:
            raise self._refusal(
                f"its architecture is {self._architecture}, and config.json has the model_type "
                f"{shown(stated)}, not {' or '.join(types)}"
            )
        for key, name in _SIZES.items():
            own, other = self._stated(key), self._configured(name)
            if own is not None and other is not None and not _is_equal(own, other):
                said = f"{key} is {shown(own)}"
                raise self._refusal(f"{said}, and in config.json {name} is {shown(other)}")
        for own, tensor in self._sources.values():
            heads = self._heads(own)
            if heads is not None and (heads < 1 or tensor.shape[0] % (2 * heads)):
                raise self._refusal(f"{own} {[*tensor.shape]} is not of {heads} heads in pairs")

    def quantisation(self, stated: Quantisation | None) -> Quantisation | None:
        """Return the form of its linears; None: they are floats.

        Args:
            stated: in config.json, which must say nothing.

        Raises:
            ModelError: it says that the weights are in codes.
        """
        if stated is not None:
            method = stated.method
            raise self._refusal(f"{stated.path} says that the weights are quantised by {method}")
        is_coded = any(weight.dtype == "U8" for weight in self.header)
        return Quantisation("gguf", {}, self.file.path) if is_coded else None

    @cached_property
    def header(self) -> tuple[StoredWeight, ...]:
        """Its weights under their names in transformers, as a header of safetensors has them."""
        return tuple(
            StoredWeight(name, "U8", tensor.byte_shape)
            if not name.endswith((".weight", ".bias"))
            else StoredWeight(name, tensor.type if tensor.type in FLOATS else "F32", tensor.shape)
            for name, (_, tensor) in self._sources.items()
        )

    def read(
        self, is_wanted: Callable[[str], object] = lambda _: True
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield weights, one at a time, by name: floats, or bytes [n, bytes of a row]."""
        for name, (own, tensor) in self._sources.items():
            if is_wanted(name):
                yield name, self._tensor(name, own, tensor)

    def _tensor(self, name: str, own: str, tensor: GgufTensor) -> "torch.Tensor":
        import torch

        shape = tensor.byte_shape
        mapped = np.memmap(self.file.path, np.uint8, "r", tensor.start, shape)
        values = torch.from_numpy(np.array(mapped))
        if tensor.type in FLOATS:
            dtypes = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
            values = values.view(dtypes[tensor.type])
        elif name.endswith(".weight"):
            values = _dequantised(name.removesuffix(".weight"), tensor.type, values)
        heads = self._heads(own)
        return values if heads is None else _unpermuted(values, heads)

    @cached_property
    def _sources(self) -> Mapping[str, tuple[str, GgufTensor]]:
        """Name and place of each tensor in the file, by its name in transformers."""
        is_tied = _HEAD not in self.file.tensors
        return {
            self._name(own, tensor, is_tied): (own, tensor)
            for own, tensor in self.file.tensors.items()
            if own not in _COMPUTED
        }

    def _name(self, own: str, tensor: GgufTensor, is_tied: bool) -> str:
        """The name of a tensor in transformers."""
        found = _NAME.fullmatch(own)
        layer, module, end = found.groups() if found else ("", "", "")
        known = _MODULES.get(module) if layer is None else _OF_A_LAYER.get(module)
        if known is None:
            raise self._refusal(f"it has {shown(own)}, which no model of its architecture has")
        path = known if layer is None else f"model.layers.{layer}.{known}"
        if tensor.type in FLOATS:
            return f"{path}.{end}"
        if len(tensor.shape) != 2 or end != "weight":
            shape = [*tensor.shape]
            raise self._refusal(f"{own} {shape} is {tensor.type}, as matrices alone can be")
        if own == _EMBEDDING:
            if not is_tied or tensor.type not in _ROW_TYPES:
                return f"{path}.weight"  # made floats of: rows are read, and nothing multiplies
            path = _MODULES["output"]
        return f"{path}.{tensor.type.lower()}"

    def _heads(self, own: str) -> int | None:
        """The number of heads among which the converter has moved rows; None: it did not."""
        module = own.split(".")[-2]
        if self._architecture not in _PERMUTED or module not in ("attn_q", "attn_k"):
            return None
        keys = ("attention.head_count_kv",) if module == "attn_k" else ()
        keys = *keys, "attention.head_count"  # without the former all have keys of their own
        stated = (self._stated(key) or self._configured(_SIZES[key]) for key in keys)
        count = next(filter(None, stated), None)
        if type(count) is not int:
            raise self._refusal(f"attention.head_count is {shown(count)}, and no number")
        return count

    def _stated(self, key: str) -> Any:
        return self.file.metadata.get(f"{self._architecture}.{key}")

    def _configured(self, name: str) -> Any:
        rope = self.fields.get("rope_parameters")
        return self.fields.get(name, rope.get(name) if isinstance(rope, Mapping) else None)

    @property
    def _architecture(self) -> str:
        return str(self.file.metadata.get("general.architecture"))

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(
            f"{self.file.path}: {reason}; pass the file with the config.json of its own model, or "
            "the model's safetensors"
        )


def gguf_weights(path: Path, fields: Mapping[str, Any]) -> GgufWeights:
    """Read the header of a GGUF file.

    Args:
        path: of the file.
        fields: of the config.json beside it.

    Raises:
        ModelError: it is damaged, or its model is not read, or another than that of config.json.
    """
    return GgufWeights(read_gguf(path), fields)


def _is_equal(stated: object, configured: object) -> bool:
    """Whether numbers are equal, in float32 as the file has them."""
    numbers = isinstance(stated, int | float) and isinstance(configured, int | float)
    return numbers and math.isclose(stated, configured, rel_tol=1e-6)


def _unpermuted(rows: "torch.Tensor", heads: int) -> "torch.Tensor":
    """Rows of each head, the halves behind one another, of which the file has pairs."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _dequantised(path: str, kind: str, rows: "torch.Tensor") -> "torch.Tensor":
    """The floats of codes that nothing multiplies by."""
    import torch

    from trt_lora.builder.checkpoint.formats import gguf
    from trt_lora.builder.checkpoint.formats.stored_linear import StoredLinear

    weight = gguf.read(StoredLinear(path, {kind.lower(): rows}, {}))
    return torch.from_numpy(weight.dequantised())
