"""Reference model: the same base model and adapters in transformers and PEFT."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils import ModulesToSaveWrapper
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from trt_lora.builder.checkpoint.base_model import load_model
from trt_lora.builder.checkpoint.checkpoint import Checkpoint
from trt_lora.builder.suppress_output import suppress_output

Ids = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.float64]


def _weight(linear: Any) -> Matrix:
    return np.asarray(linear.weight.detach().double().numpy())


def _turned(factor: torch.Tensor) -> Matrix:
    return np.asarray(factor.detach().double().mT.numpy())


def _token_factors(layer: Any, adapter: str) -> tuple[Matrix, Matrix]:
    """What trained rows are beside the base model's: of an embedding, or of a head."""
    is_head = isinstance(layer.get_base_layer(), torch.nn.Linear)
    size = layer.get_base_layer().weight.shape[0]
    one_hot = np.eye(size)[layer.token_indices[adapter]]
    rows = layer.trainable_tokens_delta[adapter] - layer.trainable_tokens_original[adapter]
    return (_turned(rows), one_hot) if is_head else (one_hot.T, _turned(rows).T)


def _saved_factors(layer: Any, adapter: str) -> tuple[Matrix, Matrix]:
    """What a module that was saved whole is beside the base model's, and the identity."""
    own, saved = layer.original_module, layer.modules_to_save[adapter]
    difference, identity = _weight(saved) - _weight(own), np.eye(own.weight.shape[1])
    is_head = isinstance(own, torch.nn.Linear)
    return (identity, difference.T) if is_head else (difference, identity)


def _set_weight(linear: Any, weight: npt.NDArray[Any]) -> None:
    """Give a linear or an embedding a weight of its own, [n, k], also where it was tied."""
    values = torch.from_numpy(weight).to(linear.weight.dtype)
    is_turned = isinstance(linear, Conv1D)
    linear.weight = torch.nn.Parameter(values.T.contiguous() if is_turned else values)


def _load(model: Path, dtype: str, attention: str) -> Any:
    checkpoint = Checkpoint(model)
    if checkpoint.quantisation is None:
        untyped: Any = AutoModelForCausalLM
        return untyped.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    base = load_model(checkpoint, dtype)  # transformers asks for the library of each format
    base.set_attn_implementation(attention)
    return base


class _Biases:
    """Biases of a model, which PEFT replaces when it loads an adapter, and never puts back."""

    def __init__(self, model: Any) -> None:
        named = model.named_parameters()
        self._biases = [weight for name, weight in named if name.endswith(".bias")]
        self._values: dict[str, list[torch.Tensor]] = {}
        self.keep("")

    def keep(self, adapter: str) -> None:
        """Keep what the biases are with an adapter, and make them the model's own."""
        self._values[adapter] = [bias.detach().clone() for bias in self._biases]
        self.put("")

    def put(self, adapter: str) -> None:
        """Give the biases the values of an adapter."""
        for bias, values in zip(self._biases, self._values[adapter], strict=True):
            bias.data.copy_(values)


def _makes_positions(module: torch.nn.Module) -> bool:
    return hasattr(module, "create_position_ids_from_input_ids")


class PeftReference:
    """A base model with PEFT adapters; the empty name is the base model."""

    def __init__(
        self,
        model: Path,
        adapters: Mapping[str, Path],
        dtype: str = "float32",
        *,
        attention: str = "eager",
        weights: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
    ) -> None:
        """Load everything on the CPU; the first adapter is active.

        Args:
            model: directory of a transformers model; codes are read as the values that they are.
            adapters: PEFT directories by name.
            dtype: of weights and activations.
            attention: transformers' implementation; "eager" is its definition, "sdpa" is faster.
            weights: [n, k] of linears and the embedding, by path, in the place of the model's.
        """
        with suppress_output():
            base = _load(model, dtype, attention)
            for linear, weight in weights.items():
                _set_weight(base.get_submodule(linear), weight)
            self._wrapped: Any = None
            biases = _Biases(base)
            for name, path in adapters.items():
                if self._wrapped is None:
                    self._wrapped = PeftModel.from_pretrained(base, path, adapter_name=name)
                else:
                    self._wrapped.load_adapter(path, adapter_name=name)
                biases.keep(name)
            self._biases = biases
        self.model: Any = (self._wrapped or base).eval()
        # RoBERTa and its kin count in their own way, and leave out padding themselves.
        self._counts_tokens = any(map(_makes_positions, self.model.modules()))

    def factors(self, adapter: str) -> dict[str, tuple[Matrix, Matrix]]:
        """Return A [k, r] and B [r, n], times the scale, of every layer that PEFT adapted.

        Of all experts together A [E, k, r] and B [E, r, n]; of trained tokens the rank is their
        number, of a module saved whole its width.
        """
        factors = {}
        for name, layer in self.model.named_modules():
            path = name.removeprefix("base_model.model.")
            if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
                if adapter in layer.lora_A:
                    untyped: Any = layer
                    b, a, scale = untyped.get_delta_factors(adapter)  # [E, n, r] and [E, r, k]
                    site = f"{path.removesuffix('.base_layer')}.{layer.parameter_name}"
                    factors[site] = _turned(a), _turned(b) * scale
            elif isinstance(layer, TrainableTokensLayer) and adapter in layer.token_indices:
                factors[path.removesuffix(".token_adapter")] = _token_factors(layer, adapter)
            elif isinstance(layer, ModulesToSaveWrapper) and adapter in layer.modules_to_save:
                factors[path] = _saved_factors(layer, adapter)
            elif isinstance(layer, LoraLayer) and adapter in layer.lora_embedding_A:
                a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
                factors[path] = _turned(a), _turned(b) * layer.scaling[adapter]
            elif isinstance(layer, LoraLayer) and adapter in layer.lora_A:
                a, b = (_weight(side[adapter]) for side in (layer.lora_A, layer.lora_B))
                factors[path] = a.T, b.T * layer.scaling[adapter]
        return factors

    @torch.inference_mode()
    def logits(self, adapter: str, ids: Ids, mask: Ids) -> npt.NDArray[np.float32]:
        """Return logits [batch, s, vocab] of ids [batch, s], without a cache, in one pass."""
        arguments = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if not self._counts_tokens:
            positions = np.maximum(mask.cumsum(axis=1) - 1, 0)
            arguments["position_ids"] = torch.from_numpy(positions)
        self._biases.put(adapter)
        if self._wrapped is not None and not adapter:
            with self._wrapped.disable_adapter():
                out = self.model(**arguments)
        else:
            if self._wrapped is not None:
                self._wrapped.set_adapter(adapter)
            out = self.model(**arguments)
        return np.asarray(out.logits.float().numpy())
