"""The LoRA of one of ComfyUI's models: adapters made of its patches, and the blend that is on."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from trt_lora.runtime import Adapter
from trt_lora.runtime.adapters.load import adapter_of_tensors
from trt_lora.runtime.pipelines.engines import PipelineEngines

from .patches import DENOISER, PatchedWeights, Patches, parts_of


@dataclass(frozen=True)
class _Taken:
    """An adapter, and what it was made of."""

    name: str
    numbers: frozenset[tuple[object, ...]]
    tensors: Mapping[tuple[str, str], weakref.ref[torch.Tensor]]  # by patch and part of it

    def is_of(self, numbers: frozenset[Any], tensors: Mapping[Any, torch.Tensor]) -> bool:
        """Whether it was made of these: the same tensors, not equal ones."""
        return (self.numbers, self.tensors.keys()) == (numbers, tensors.keys()) and all(
            kept() is tensors[name] for name, kept in self.tensors.items()
        )

    @property
    def is_gone(self) -> bool:
        """Whether ComfyUI has dropped a tensor: then no model has the patches any more."""
        return any(kept() is None for kept in self.tensors.values())


class ModelLoras:
    """What is patched into a MODEL or a CLIP; all of its clones share this.

    One blend is on at a time, as ComfyUI has one clone of a model loaded at a time.
    """

    def __init__(self, engines: PipelineEngines, components: tuple[str, ...]) -> None:
        """Take the engines, and which of them are of this model."""
        self.engines = engines
        self._weights = {c: PatchedWeights(engines.engines[c].manifest) for c in components}
        self._blend = f"ComfyUI's {components[0]}"
        self._taken, self._numbers = list[_Taken](), count(1)
        self._on: dict[str, float] = {}

    def take(self, patches: Patches, *, of_denoiser: bool) -> str | None:
        """Return the name of the adapter that patches are; None if none is of this model.

        Patches of the tensors of an adapter are that adapter: another strength reads nothing.

        Raises:
            AdapterError: the engines cannot take a patch; the message names it.
        """
        own = {
            key: patch
            for key, patch in patches.items()
            if _name(key).startswith(DENOISER) == of_denoiser
        }
        if not own:
            return None
        self._forget()
        values = {
            (str(key), end): value
            for key, patch in own.items()
            for end, value in parts_of(key, patch)
        }
        tensors = {at: value for at, value in values.items() if isinstance(value, torch.Tensor)}
        numbers = frozenset((at, str(values[at])) for at in values.keys() - tensors.keys())
        for taken in self._taken:
            if taken.is_of(numbers, tensors):
                return taken.name
        name = f"{self._blend} {next(self._numbers)}"
        self.engines.adapters.add(name, self._adapters(name, own))
        kept = {at: weakref.ref(value) for at, value in tensors.items()}
        self._taken.append(_Taken(name, numbers, kept))
        return name

    def _adapters(self, name: str, own: Patches) -> dict[str, Adapter]:
        made = {
            component: adapter_of_tensors(name, weights.tensors(own), weights.manifest)
            for component, weights in self._weights.items()
        }
        return {c: each for c, each in made.items() if each.weights or each.unusable_keys}

    def _forget(self) -> None:
        """Unload adapters that no model has."""
        for taken in [taken for taken in self._taken if taken.is_gone]:
            self._taken.remove(taken)
            self.engines.adapters.unload(taken.name)

    def switch_on(self, strengths: Mapping[str, float]) -> None:
        """Let runs have a weighted sum of adapters from now on: no value of the engine changes.

        Raises:
            AdapterError: the ranks of a site exceed the engine's together.
        """
        parts = {name: strength for name, strength in strengths.items() if strength}
        if parts and parts != self._on:
            self.engines.adapters.blend(self._blend, parts, replace=True)
        self._on = parts

    @property
    def adapter(self) -> str | None:
        """What a run takes; None is the base model."""
        return self._blend if self._on else None


def _name(key: Any) -> str:
    return str(key if isinstance(key, str) else key[0])
