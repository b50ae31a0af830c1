"""Stores of a pipeline's components without engines, and adapters for several of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.adapters.diffusion.file_kinds import flat
from support.adapters.diffusion.models import Deltas, engine, engine_of
from support.adapters.diffusion.writing import PEFT, Writing
from support.fakes.fake_engine import FakeExecutor

from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.pipelines.adapters import PipelineAdapters
from trt_lora.runtime.store.store import AdapterStore

MODELS = {"unet": "sdxl", "text_encoder": "clip_l", "text_encoder_2": "clip_g"}
UNET = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
LAYER, LAST = "encoder.layers.3.mlp.fc1", "encoder.layers.11.mlp.fc1"
PATHS = {"unet": UNET, "text_encoder": LAYER, "text_encoder_2": f"text_model.{LAYER}"}
KOHYA_PREFIXES = {
    "unet": "lora_unet_",
    "text_encoder": "lora_te1_text_model_",
    "text_encoder_2": "lora_te2_text_model_",
}


def manifests() -> dict[str, Manifest]:
    """Blocks of SDXL's components; the last layer of the first text encoder has no effect."""
    dead = tuple(site.path for site in engine("clip_l").sites if ".layers.11." in site.path)
    kept = ("down_blocks.1.attentions.0.", "down_blocks.2.attentions.0.proj_in", ".layers.3.")
    return {
        component: engine_of(
            model,
            lambda path: any(part in path for part in kept),
            component=component,
            no_effect=dead if component == "text_encoder" else (),
        )
        for component, model in MODELS.items()
    }


def stores() -> dict[str, AdapterStore]:
    """A store for each of them."""
    return {c: AdapterStore(FakeExecutor(manifest)) for c, manifest in manifests().items()}


def deltas_of(adapters: PipelineAdapters, held: dict[str, AdapterStore], name: str) -> Deltas:
    """What a name adds to each module now, by component and path."""
    found = Deltas()
    for component, store in held.items():
        own = adapters.on(component, name)
        if own is not None:
            found |= {f"{component}.{p}": d for p, d in _deltas(store, own).items()}
    return found


def _deltas(store: AdapterStore, name: str) -> Deltas:
    tensors, found = store.bindings.rows([name]), Deltas()
    for site in store.get_coverage(name).adapted:
        a, b = (tensors[each].numpy() for each in store.manifest.binding_names.pair(site.path))
        found[site.path] = (a.astype(np.float64) @ b.astype(np.float64)).T
    return found


class PipelineWriting:
    """A file for several components, and what it adds to each module."""

    def __init__(self, seed: int = 0) -> None:
        self.parts = {c: Writing(engine(model)) for c, model in MODELS.items()}
        self.expected: Deltas = {}
        for part in self.parts.values():
            part.seed(seed)

    def kohya(self, components: Sequence[str] = tuple(MODELS)) -> "PipelineWriting":
        for component in components:
            path = PATHS[component]
            stem = KOHYA_PREFIXES[component] + flat(path.removeprefix("text_model."))
            self.parts[component].add(stem, path, alpha=np.float32(1))
        return self

    def diffusers(self, components: Sequence[str] = tuple(MODELS)) -> "PipelineWriting":
        for component in components:
            path = PATHS[component]
            self.parts[component].add(f"{component}.{path}", path, ends=PEFT)
        return self

    def last_layer(self) -> "PipelineWriting":
        """What training leaves for a layer that SDXL does not read."""
        self.parts["text_encoder"].add(f"text_encoder.text_model.{LAST}", LAST, ends=PEFT)
        del self.parts["text_encoder"].expected[LAST]
        return self

    def save(self, path: Path) -> Path:
        whole = Writing(engine("sdxl"))
        for component, part in self.parts.items():
            whole.tensors |= part.tensors
            self.expected |= {f"{component}.{p}": delta for p, delta in part.expected.items()}
        return whole.save(path)
