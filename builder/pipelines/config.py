"""Options of the engines of a diffusers pipeline."""

from dataclasses import dataclass

from trt_lora.builder.graphs.config import GraphConfig
from trt_lora.plugins.checked import check_fields
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.short_repr import short_repr


@short_repr
@dataclass(frozen=True)
class PipelineConfig:
    """The options of `build-engine` for a diffusers pipeline.

    Raises:
        ConfigError: an option is of one component, which cannot mean several.
    """

    # Of every component: `onnx` is the pipeline's folder, with model_index.json, and `output` the
    # directory of all engines. A component gets those targets and shapes that it has.
    graph: GraphConfig
    components: tuple[str, ...] = ()  # names in model_index.json; empty: all that take LoRA

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        check_fields(self)
        for name, instead in _OF_ONE_GRAPH.items():
            if getattr(self.graph, name):
                raise ConfigError(
                    f"--{name.removesuffix('s').replace('_', '-')} is of one graph, and "
                    f"{self.graph.onnx} is a pipeline of several; {instead}"
                )


_PATHS = "paths are those of diffusers"
_OF_ONE_GRAPH = {
    "lora_dirs": "pass --lora-target-modules and --max-lora-rank",
    "path_prefix": _PATHS,
    "site_map": _PATHS,
    "component": "each is told its own",
    "outputs": "what it reads of each is known",
}
