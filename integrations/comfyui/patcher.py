"""ComfyUI's ModelPatcher for a model that engines run: patches are LoRA inputs of them."""

# pyright: reportMissingImports=false

import uuid
from typing import Any, NoReturn

import comfy.model_patcher
import torch

from trt_lora.plugins.errors import AdapterError

from .loras import ModelLoras
from .patches import Patches

_STRENGTHS = "trt_lora"  # the attachment that clones inherit
LORAS = "trt_lora"  # attribute of a model that an engine runs


class EnginePatcher(comfy.model_patcher.ModelPatcher):
    """Keeps strengths where ModelPatcher changes weights; a clone has its own."""

    @property
    def model_loras(self) -> ModelLoras:
        """What all clones of the model share."""
        loras: ModelLoras = getattr(self.model, LORAS)
        return loras

    @property
    def strengths(self) -> dict[str, float]:
        """The strength of each adapter of this clone, by its name."""
        return self.get_attachment(_STRENGTHS) or {}

    def add_lora(self, name: str, strength: float) -> None:
        """Add an adapter that the engines have; one that is there already becomes stronger."""
        before = self.strengths
        self.set_attachments(_STRENGTHS, before | {name: before.get(name, 0.0) + strength})
        self.patches_uuid = uuid.uuid4()  # by which ComfyUI sees that there is something to load

    def add_patches(
        self, patches: Patches, strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> list[Any]:
        """Take the patches that are of this model, as ModelPatcher does; return their keys.

        Raises:
            AdapterError: one of them cannot be an input of the engine, or would scale its weights.
        """
        if strength_model != 1.0:
            raise AdapterError(
                f"strength_model {strength_model} scales the weights of the model, which are in "
                "the engine; build an engine of the merged checkpoint"
            )
        name = self.model_loras.take(patches, of_denoiser=not self.is_clip)
        if name is not None:
            self.add_lora(name, strength_patch)
        taken: list[Any] = super().add_patches(patches, strength_patch, strength_model)
        return taken

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        """Switch this clone's adapters on, at its strengths."""
        super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)
        self.model_loras.switch_on(self.strengths)

    def get_key_patches(self, filter_prefix: str | None = None) -> NoReturn:
        """Refuse to give weights, which are merged with others'."""
        raise AdapterError(
            "the weights of an engine cannot be merged or saved; merge the checkpoints, and build "
            "an engine of the result"
        )

    def add_hook_patches(
        self, hook: Any, patches: Patches, strength_patch: float = 1.0, strength_model: float = 1.0
    ) -> NoReturn:
        """Refuse patches that come and go between steps."""
        raise AdapterError(
            "LoRA by hooks (a schedule of strengths) is not supported on an engine; use LoraLoader"
        )


class NamedWeights(torch.nn.Module):
    """A module without weights whose state_dict has names, by which ComfyUI finds patches."""

    def __init__(self, names: list[str]) -> None:
        """Take the names of the weights."""
        super().__init__()
        self._names = names

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: torch.empty(0) for name in self._names})
