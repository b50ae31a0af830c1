"""Build the engines of a diffusers pipeline, all of them or none."""

from trt_lora.builder.build import check_output, list_sites, may_replace, resolve_graph
from trt_lora.builder.graphs.config import GraphConfig
from trt_lora.builder.pipelines.config import PipelineConfig
from trt_lora.builder.pipelines.pipeline_folder import read_pipeline_folder
from trt_lora.builder.progress import NoProgress, Progress
from trt_lora.builder.targets import SiteList
from trt_lora.plugins.atomic_files import publish_directory
from trt_lora.plugins.checked import checked
from trt_lora.plugins.extras import extra
from trt_lora.runtime.manifest import PIPELINE_FILE, Manifest
from trt_lora.runtime.pipelines.pipeline_file import PipelineFile


@checked
def build_pipeline(config: PipelineConfig, progress: Progress | None = None) -> dict[str, Manifest]:
    """Build the engines of a pipeline's components, and return their manifests, by component.

    The directory `config.graph.output` has an engine directory for each, and pipeline.json. It
    appears when everything in it is complete, as `build_engine` makes one. Of a text encoder the
    engine returns what the pipeline reads, and linears that this does not depend on are in the
    manifest's `no_effect`.

    Raises:
        ConfigError: as `build_engine`; or an option or component fits nothing in the pipeline.
        ModelError, AdapterError, BackendError: as `build_engine`.
    """
    progress, graph = progress or NoProgress(), config.graph
    check_output(graph)
    progress.stage("check")
    builds = {name: resolve_graph(c, progress) for name, c in _configs(config, progress).items()}
    from trt_lora.builder.graphs.write_graph import write_graph

    with publish_directory(graph.output, lambda path: may_replace(graph, path)) as work:
        manifests = {}
        for name, build in builds.items():
            progress.note(f"{name}, an engine of its own:")
            (work / name).mkdir()
            manifests[name] = write_graph(build, work / name, progress)
        kind = read_pipeline_folder(graph.onnx).kind
        file = PipelineFile(kind, {name: name for name in manifests})
        (work / PIPELINE_FILE).write_text(file.to_json(), encoding="utf-8")
    return manifests


@checked
def list_pipeline_sites(
    config: PipelineConfig, progress: Progress | None = None
) -> dict[str, SiteList]:
    """Return where `build_pipeline` would insert LoRA, by component; see `list_sites`.

    Raises:
        ConfigError, ModelError, AdapterError, BackendError: as `build_pipeline`.
    """
    progress = progress or NoProgress()
    return {name: list_sites(c, progress) for name, c in _configs(config, progress).items()}


def _configs(config: PipelineConfig, progress: Progress) -> dict[str, GraphConfig]:
    with extra("export", "building engines"):
        from trt_lora.builder.pipelines.component_options import component_configs
    configs = component_configs(config)
    if left_out := read_pipeline_folder(config.graph.onnx).others:
        progress.note(f"{', '.join(left_out)} of the pipeline cannot be built, and stay torch's")
    return configs
