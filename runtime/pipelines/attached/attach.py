"""A pipeline of diffusers on engines, beside the one it is made of."""

import inspect
from collections.abc import Mapping
from typing import Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean, listed
from trt_lora.runtime.engine import Engine
from trt_lora.runtime.pipelines.adapters import PipelineAdapters
from trt_lora.runtime.pipelines.attached.active_adapters import ActiveAdapters
from trt_lora.runtime.pipelines.attached.engine_module import EngineModule
from trt_lora.runtime.pipelines.attached.lora_methods import LoraMethods


def attach(engines: Mapping[str, Engine], adapters: PipelineAdapters, pipe: Any) -> Any:
    """Return a pipeline of the same class whose models are engines, and which shares the rest.

    Neither `pipe` nor its class is changed.

    Args:
        engines: by component.
        adapters: of all of them.
        pipe: a `DiffusionPipeline` of diffusers.

    Raises:
        ConfigError: it has no component of that name, or an engine is of no class of diffusers or
            transformers.
    """
    parts = dict(pipe.components)
    there = [name for name, part in parts.items() if part is not None]
    if unknown := [name for name in engines if name not in there]:
        raise ConfigError(
            f"{type(pipe).__name__} has no component {unknown[0]!r}; it has: {listed(there)}"
            f"{did_you_mean(unknown[0], there)}"
        )
    active = ActiveAdapters(adapters)
    for name, engine in engines.items():
        parts[name] = EngineModule(name, engine, parts[name].config, active)
    made = _class_of(pipe, list(engines))(**parts, **_options(pipe, parts))
    made.set_progress_bar_config(**getattr(pipe, "_progress_bar_config", {}))
    made.engine_lora = active
    return made


def _class_of(pipe: Any, components: list[str]) -> Any:
    """A subclass of a pipeline's class with our methods."""
    bases = (type(pipe),) if isinstance(pipe, LoraMethods) else (LoraMethods, type(pipe))
    return type(f"Attached{bases[-1].__name__}", bases, {"_lora_loadable_modules": components})


def _options(pipe: Any, parts: Mapping[str, Any]) -> dict[str, Any]:
    """What a pipeline was made with beside its components."""
    taken = inspect.signature(type(pipe).__init__).parameters
    return {name: pipe.config[name] for name in taken if name in pipe.config and name not in parts}
