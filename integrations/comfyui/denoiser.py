"""MODEL: ComfyUI's model of a family, around an engine that does the work of its denoiser."""

# pyright: reportMissingImports=false

import re
from typing import Any

import comfy.model_management
import comfy.supported_models
import torch
from torch import Tensor

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.adapters.formats.diffusion.transformer_names import original_transformer_names
from trt_lora.runtime.adapters.formats.diffusion.unet_names import original_unet_names
from trt_lora.runtime.pipelines.engines import PipelineEngines

from .engine_run import run_engine
from .families import Call, Family, sizes_beside_text
from .layouts import layout_of
from .loras import ModelLoras
from .patcher import LORAS, EnginePatcher, NamedWeights

_PROCESSOR = re.compile(r"\.processor\.")  # xlabs' names, which are of no weight


def model_of(engines: PipelineEngines, component: str, family: Family) -> EnginePatcher:
    """Return the MODEL of an engine."""
    kind = getattr(comfy.supported_models, family.config)
    layout = layout_of(family.config, engines.engines[component].manifest)
    model = kind(layout | {"disable_unet_model_creation": True}).get_model({})
    loras = ModelLoras(engines, (component,))
    model.diffusion_model = EngineDenoiser(component, family, loras)
    model.memory_required = _none_required
    if family.config == "SDXL":
        model.encode_adm = _sizes_beside_text
    setattr(model, LORAS, loras)
    device = comfy.model_management.get_torch_device()
    return EnginePatcher(model, device, comfy.model_management.unet_offload_device())


class EngineDenoiser(NamedWeights):
    """What ComfyUI calls as the diffusion model."""

    dtype = torch.float32  # of what ComfyUI passes: the engine rounds its inputs itself

    def __init__(self, component: str, family: Family, loras: ModelLoras) -> None:
        """Take how the engine is called, and what is on."""
        manifest = loras.engines.engines[component].manifest
        paths = [*(site.path for site in manifest.sites), *manifest.no_effect]
        names = {name for name, _ in original_unet_names(paths)}
        names |= {n for n, _ in original_transformer_names(paths) if not _PROCESSOR.search(n)}
        super().__init__([f"{name}.weight" for name in sorted(names)])
        self._component, self._family, self._loras = component, family, loras

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        guidance: Tensor | None = None,
        control: object = None,
        transformer_options: dict[str, Any] | None = None,
        **conditions: object,
    ) -> Tensor:
        """Run one step with the adapters that are on; see ComfyUI's models for the shapes.

        Raises:
            ConfigError: ComfyUI passes what an engine has no input for; the message names it.
        """
        options = transformer_options or {}
        patches = {**options.get("patches", {}), **options.get("patches_replace", {})}
        given = {"control": control, **conditions, **patches}
        if unknown := [name for name, value in given.items() if value is not None and value != {}]:
            raise ConfigError(
                f"{', '.join(unknown)}: an engine has no input for it (ControlNet, IP-Adapter and "
                "patches of attention need a model that ComfyUI runs itself)"
            )
        call = Call(x, timesteps, context, y, guidance)
        inputs = self._family.inputs(call)
        outputs = run_engine(self._loras.engines, self._component, inputs, self._loras.adapter)
        return self._family.output(next(iter(outputs.values())), call).to(x)


def _none_required(*shapes: object, **cond_shapes: object) -> int:
    """Of ComfyUI's memory, so that it passes whole batches; the engine has its own."""
    return 0


def _sizes_beside_text(**conditions: Any) -> Tensor:
    return sizes_beside_text(conditions)
