"""The folder of a diffusers pipeline: its components, and what it reads of their outputs.

`model_index.json` names its class and its components, as diffusers writes it:
https://huggingface.co/docs/diffusers/using-diffusers/loading
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trt_lora.builder.graphs.component_folder import MODEL_INDEX, is_component
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean
from trt_lora.runtime.adapters.formats.diffusion.spellings import COMPONENTS
from trt_lora.runtime.files.json_file import read_json

_LAST, _BEFORE, _POOLED = "last_hidden_state", "hidden_state_2", "pooled"
_TEXT = ("text_encoder", "text_encoder_2", "text_encoder_3")
# By family, what its pipelines read of each text encoder, in the order of _TEXT:
# https://github.com/huggingface/diffusers/tree/v0.42.1/src/diffusers/pipelines
_READ: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "StableDiffusion": ((_LAST,),),
    "StableDiffusionXL": ((_BEFORE,), (_BEFORE, _POOLED)),
    "StableDiffusion3": ((_BEFORE, _POOLED), (_BEFORE, _POOLED), (_LAST,)),
    "Flux": ((_POOLED,), (_LAST,)),
}
_TASKS = ("", "Img2Img", "Inpaint")  # others may read something else


@dataclass(frozen=True)
class PipelineFolder:
    """What model_index.json says of the components that may take LoRA."""

    path: Path
    kind: str  # name of the pipeline's class
    components: tuple[str, ...]  # those whose class takes LoRA
    others: tuple[str, ...]  # those by such a name whose class does not

    def chosen(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """Return the components that were asked for, in the pipeline's order; none: all.

        Raises:
            ConfigError: one is not there; the message lists those that are.
        """
        for name in asked:
            if name not in self.components:
                why = "takes no LoRA" if name in self.others else "is no component that takes LoRA"
                raise ConfigError(
                    f"--components {name}: it {why} in {self.path}, a {self.kind}; those that do: "
                    f"{', '.join(self.components) or 'none'}{did_you_mean(name, self.components)}"
                )
        return tuple(name for name in self.components if name in asked or not asked)

    def outputs_read(self, component: str) -> tuple[str, ...]:
        """Return the outputs that the pipeline reads of a component; none: all, or not known."""
        for family, read in _READ.items():
            if self.kind in (f"{family}{task}Pipeline" for task in _TASKS):
                places = dict[str, tuple[str, ...]](zip(_TEXT, read, strict=False))
                return places.get(component, ())
        return ()


def is_pipeline(folder: Path) -> bool:
    """Whether a folder is that of a pipeline."""
    return (folder / MODEL_INDEX).is_file()


def read_pipeline_folder(folder: Path) -> PipelineFolder:
    """Return what the folder of a pipeline says.

    Raises:
        AdapterError: model_index.json cannot be read.
        ConfigError: no component of it takes LoRA.
    """
    index = read_json(folder / MODEL_INDEX)
    named = [name for name in COMPONENTS if index.get(name) not in (None, [None, None])]
    takers = tuple(name for name in named if is_component(folder / name))
    kind = str(index.get("_class_name", "pipeline of no class"))
    others = tuple(name for name in named if name not in takers)
    if not takers:
        raise ConfigError(f"{folder}, a {kind}, has no component that takes LoRA: {list(index)}")
    return PipelineFolder(folder, kind, takers, others)
