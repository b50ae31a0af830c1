"""An engine with vectors beside a tiny model and adapters for it by PEFT."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.runtime import Engine, open_engine


@dataclass(frozen=True)
class VectorEngine:
    """The engine, and what PEFT needs."""

    model: Path
    adapters: dict[str, Path]
    engine: Engine


def vector_engine(
    architecture: str,
    folder: Path,
    stack: ExitStack,
    adapters: Mapping[str, Mapping[str, Any]],
    **options: Any,
) -> VectorEngine:
    """Build an engine below a folder and open it on the stack.

    Args:
        architecture: of the model.
        folder: that gets all of it.
        stack: that closes the engine.
        adapters: by name, the fields of each config; every one has another rank.
        options: of the build.
    """
    model = save_model(architecture, folder / "model")
    quick_build(tiny_config(model, folder / "engine", lora_vectors=True, **options))
    engine = stack.enter_context(open_engine(folder / "engine"))
    saved = {
        name: save_adapter(model, folder / name, seed=seed, r=3 + seed, lora_alpha=8, **fields)
        for seed, (name, fields) in enumerate(adapters.items())
    }
    return VectorEngine(model, saved, engine)
