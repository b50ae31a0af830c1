"""The options of a pipeline's build as those of each of its components."""

from collections.abc import Mapping
from dataclasses import replace

from trt_lora.builder.graphs.config import GraphConfig
from trt_lora.builder.graphs.shapes import check_symbols, read_shapes
from trt_lora.builder.graphs.targets import GraphTargets, no_such_target
from trt_lora.builder.graphs.trace_component import Outline, outline
from trt_lora.builder.pipelines.config import PipelineConfig
from trt_lora.builder.pipelines.pipeline_folder import read_pipeline_folder
from trt_lora.plugins.errors import ConfigError


def component_configs(config: PipelineConfig) -> dict[str, GraphConfig]:
    """Return the options of each component: the targets and the shapes that it has.

    Nothing but configs is read, so that what fits no component is refused before a weight is read.

    Raises:
        ConfigError: there is no such component, a target or a shape fits none, a component has no
            target, or a size of one has no range.
        ModelError: nothing says how a component is called.
        AdapterError: a file of the folder cannot be read.
        BackendError: diffusers is not installed.
    """
    graph, folder = config.graph, read_pipeline_folder(config.graph.onnx)
    outlines = {name: outline(folder.path / name) for name in folder.chosen(config.components)}
    targets = _targets(graph, outlines)
    shapes = _shapes(graph, outlines)
    return {
        name: replace(
            graph,
            onnx=folder.path / name,
            output=graph.output / name,
            target_modules=targets[name],
            shapes=shapes[name],
            component=name,
            outputs=folder.outputs_read(name),
        )
        for name in outlines
    }


def _targets(graph: GraphConfig, outlines: Mapping[str, Outline]) -> dict[str, tuple[str, ...]]:
    named = GraphTargets.from_names(graph.target_modules).modules
    missing = {
        name: GraphTargets(named, each.kernels).unmatched(each.paths)
        for name, each in outlines.items()
    }
    for target in graph.target_modules:
        if all(target in names for names in missing.values()):
            paths = [path for each in outlines.values() for path in sorted(each.paths)]
            raise no_such_target(f"no component ({', '.join(outlines)})", target, paths)
    for name, absent in missing.items():
        if len(absent) == len(named):
            raise ConfigError(
                f"{name} has no linear of --lora-target-modules {' '.join(named)}; add one of its "
                f"own, or leave it out with --components {_without(name, outlines)}"
            )
    return {n: tuple(t for t in named if t not in absent) for n, absent in missing.items()}


def _without(name: str, outlines: Mapping[str, Outline]) -> str:
    return " ".join(other for other in outlines if other != name) or "NAME"


def _shapes(graph: GraphConfig, outlines: Mapping[str, Outline]) -> dict[str, tuple[str, ...]]:
    """The ranges of each component."""
    given = dict(zip(read_shapes(graph.shapes), graph.shapes, strict=True))
    users = {symbol: name for name, each in outlines.items() for symbol in sorted(each.symbols)}
    if given:  # else a component that needs some says so when it is built
        check_symbols(users, given)
    return {
        name: tuple(text for symbol, text in given.items() if symbol in each.symbols)
        for name, each in outlines.items()
    }
