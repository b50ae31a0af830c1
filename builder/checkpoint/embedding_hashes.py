"""Hashes of the weights that PEFT may copy into an adapter: embedding, output head, biases."""

from collections.abc import Iterator
from typing import Any

import torch

from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.checkpoint.loaded_weights import own_names
from trt_lora.builder.checkpoint.stored_linears import float_tensors
from trt_lora.runtime.files.base_weights import BLOCK, EXACT, BaseWeight, values_sha256
from trt_lora.runtime.memory.dtypes import Float32

_DTYPES = {
    EXACT: torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}  # that PEFT's users load models in


def embedding_hashes(
    checkpoint: Checkpoint, model: Any, *, with_biases: bool = False
) -> dict[str, BaseWeight]:
    """Return hashes of the checkpoint's values, by the weights' paths in the model.

    A weight that transformers makes of others, or gives another name than the checkpoint does, has
    none.

    Args:
        checkpoint: on disk.
        model: what transformers loaded from it, in any dtype.
        with_biases: those of all modules too.
    """
    wanted = dict(_embeddings(model))
    if with_biases:
        biases = (name for name, _ in model.named_parameters() if name.endswith(".bias"))
        wanted = {name: {name} for name in biases} | wanted

    def paths_of(name: str) -> list[str]:
        spellings = {*own_names(name, model)}
        return [path for path, names in wanted.items() if names & spellings]

    return {
        path: hashes
        for _, name, stored in float_tensors(checkpoint, paths_of)
        for path, hashes in dict.fromkeys(paths_of(name), _hashed(stored)).items()
    }


def _embeddings(model: Any) -> Iterator[tuple[str, set[str]]]:
    """Paths of the weights, each with the names of all that are tied to it."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = list(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        if any(module is end for end in ends):
            for name, weight in module.named_parameters():
                yield f"{path}.{name}", {other for other, tied in weights if tied is weight}


def _hashed(weight: torch.Tensor) -> BaseWeight:
    """Round to every dtype, and keep what differs."""
    hashes = dict[str, str]()
    for name, dtype in _DTYPES.items():
        digest = values_sha256(_blocks(weight, dtype))
        if digest not in hashes.values():
            hashes[name] = digest
    return BaseWeight(tuple(weight.shape), hashes)


def _blocks(weight: torch.Tensor, dtype: torch.dtype) -> Iterator[Float32]:
    values = weight.reshape(-1)
    for start in range(0, len(values), BLOCK):
        yield values[start : start + BLOCK].to(dtype).float().numpy()
