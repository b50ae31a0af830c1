"""Build an engine directory, or list its LoRA sites; fail fast on bad options."""

import os
import shutil
from pathlib import Path

from trt_lora.builder.checks.check_model import check_model
from trt_lora.builder.config import FLOAT8_SINCE, BuildConfig
from trt_lora.builder.graphs.config import GraphConfig, ResolvedGraph
from trt_lora.builder.graphs.targets import resolve_graph_lora
from trt_lora.builder.progress import NoProgress, Progress
from trt_lora.builder.resolved import ResolvedBuild
from trt_lora.builder.resolved_lora import resolve_lora
from trt_lora.builder.targets import SiteList, Targets
from trt_lora.plugins.atomic_files import publish_directory
from trt_lora.plugins.checked import checked
from trt_lora.plugins.contract.modules import EXPERTS_DOWN, EXPERTS_GATE_UP, PARTS
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.plugins.tensorrt.flavour import Flavour, flavour_named, installed_flavour
from trt_lora.runtime.manifest import MANIFEST_FILE, PIPELINE_FILE, Manifest

AnyConfig = BuildConfig | GraphConfig


@checked
def build_engine(config: AnyConfig, progress: Progress | None = None) -> Manifest:
    """Build the engine directory `config.output` and return its manifest.

    The directory appears when everything in it is complete; a build that fails or is interrupted
    leaves nothing behind. What the options, the config of the model and its modules tell is refused
    before a weight is read.

    Raises:
        ConfigError: an option is wrong, there is no room for the engine, or something is at
            `config.output` that may not be replaced: without `config.force` anything, with it all
            but an engine. If it came during the build, the message says where the engine is.
        ModelError: the base model cannot be loaded, exported or compiled, or an ONNX file of it
            does not run.
        AdapterError: an adapter in `config.lora_dirs` cannot be read.
        BackendError: the flavour asked for, or the extra `export`, is not installed.
    """
    progress = progress or NoProgress()
    check_output(config)
    if isinstance(config, GraphConfig):
        return _build_graph(config, progress)
    build = _resolve(config, progress)
    _check_room(config, build.model.weight_bytes, has_plan=build.has_plan)
    with extra("export", "building an engine"):
        from trt_lora.builder.write_engine import write_engine
    with publish_directory(config.output, lambda path: may_replace(config, path)) as work:
        return write_engine(build, work, progress)


def _build_graph(config: GraphConfig, progress: Progress) -> Manifest:
    build = resolve_graph(config, progress)
    with extra("export", "building an engine"):
        from trt_lora.builder.graphs.write_graph import write_graph
    with publish_directory(config.output, lambda path: may_replace(config, path)) as work:
        return write_graph(build, work, progress)


def resolve_graph(config: GraphConfig, progress: Progress) -> ResolvedGraph:
    """Return the options of a graph's build with nothing left to choose.

    Raises:
        ConfigError, AdapterError, BackendError: as `build_engine`.
    """
    lora = resolve_graph_lora(config)
    flavour = _choose_flavour(config, progress)
    _check_targets(config, flavour)
    return ResolvedGraph(config, lora, flavour, _choose_plugin(config, flavour, progress))


def list_sites(config: AnyConfig, progress: Progress | None = None) -> SiteList:
    """Return where `build_engine` would insert LoRA, and what it would leave alone and why.

    It looks at the modules of the model alone, or at the graph: no weight is read, nothing is
    exported.

    Raises:
        ConfigError: an option is wrong, or a target matches no linear of the model.
        ModelError: the model is not one that can be built.
        AdapterError: an adapter in `config.lora_dirs` cannot be read.
        BackendError: the extra `export` is not installed.
    """
    (progress or NoProgress()).stage("check")
    if isinstance(config, GraphConfig):
        with extra("export", "reading a graph"):
            from trt_lora.builder.graphs.read_graph import read_graph
            from trt_lora.builder.graphs.write_graph import insert_into_graph
        lora = resolve_graph_lora(config)
        graph = read_graph(config.onnx, config.dtype, config.outputs)
        return insert_into_graph(graph, config, lora)
    return check_model(config, resolve_lora(config)).sites


def _resolve(config: BuildConfig, progress: Progress) -> ResolvedBuild:
    lora = resolve_lora(config)
    flavour = _choose_flavour(config, progress)
    _check_targets(config, flavour)
    lora_plugin = _choose_plugin(config, flavour, progress)
    progress.stage("check")
    if flavour is not None and lora_plugin != "plugin":
        _refuse_experts(lora.targets, lora_plugin)
    return ResolvedBuild(config, lora, flavour, lora_plugin, check_model(config, lora))


def _refuse_experts(targets: Targets, lora_plugin: str) -> None:
    """TensorRT builds no function whose form depends on the number of tokens; aot has no slots."""
    experts = {EXPERTS_GATE_UP, *PARTS[EXPERTS_GATE_UP], EXPERTS_DOWN} & targets.all_modules
    if experts:
        raise ConfigError(
            f"{min(experts)} is of experts, whose LoRA in a plan is the plugin's, and lora_plugin "
            f"is {lora_plugin!r}; pass --lora-plugin plugin or --flavour none, or leave it out"
        )


def check_output(config: AnyConfig) -> None:
    """Refuse an output that stands and may not be replaced.

    Raises:
        ConfigError: it does.
    """
    output = config.output
    if not os.path.lexists(output) or may_replace(config, output):
        return
    if not config.force:
        raise ConfigError(f"{output} exists; choose another --output, or replace it with --force")
    raise ConfigError(f"{output} is not an engine directory; --force replaces nothing else")


def may_replace(config: AnyConfig, output: Path) -> bool:
    """Return whether the output may be replaced: engines or an empty folder, only with force."""
    if not config.force or any((output / f).is_file() for f in (MANIFEST_FILE, PIPELINE_FILE)):
        return config.force
    return output.is_dir() and not any(output.iterdir())


def _check_room(config: BuildConfig, weight_bytes: int, *, has_plan: bool) -> None:
    """Refuse a build whose weights alone would not fit beside its output.

    What stands at the output is replaced in the end, so both are there for a while, and a plan of
    codes is made of a copy. The graph, the plan's kernels and the tokenizer are not counted.
    """
    output = config.output
    # The end of the path may not be there yet.
    there = next((path for path in (output, *output.absolute().parents) if path.is_dir()), output)
    is_coded = config.quantize != "none"
    copies, free = 1 + has_plan * (1 + is_coded), shutil.disk_usage(there).free
    if free < (needed := weight_bytes * copies):
        plan = " and a plan of them" if has_plan else ""
        cures = ["make room", "choose another --output"]
        cures += ["pass --dtype float16"] if config.dtype == "float32" and not is_coded else []
        cures += ["pass --flavour none"] if has_plan else []
        raise ConfigError(
            f"{output} takes at least {needed / 1e6:.1f} MB (weights in "
            f"{config.quantize if is_coded else config.dtype}"
            f"{plan}), {free / 1e6:.1f} MB are free there; {', '.join(cures[:-1])} or {cures[-1]}"
        )


def _choose_flavour(config: AnyConfig, progress: Progress) -> Flavour | None:
    if config.flavour == "none":
        return None
    if config.flavour != "auto":
        flavour = flavour_named(config.flavour)
        flavour.load()  # fail before the export, which takes minutes
        return flavour
    installed = installed_flavour()
    if installed is None:
        progress.note("no TensorRT is installed: only the ONNX file is made (as --flavour none)")
    return installed


def _check_targets(config: AnyConfig, flavour: Flavour | None) -> None:
    """Refuse compute capabilities that no plan can be made for."""
    if flavour is None and config.quantize == "fp8":
        raise ConfigError("--quantize fp8 is for a plan, and none is made; pass --quantize int8")
    known = () if flavour is None else tuple(flavour.compute_capabilities())
    for target in config.compute_capability:
        if flavour is None:
            reason = "no plan is made; pass --flavour tensorrt-rtx"
        elif not known:
            reason = f"{flavour.name} compiles for the GPU that it runs on; leave the option out"
        elif target not in known:
            reason = f"{flavour.name} compiles for: {', '.join(known)}"
        elif float(target) < 8 and config.lora_plugin != "native":
            reason = "our kernels run on 8.0 and later; pass --lora-plugin native"
        elif float(target) < 8 and "int4" in (config.quantize, config.quantize_head):
            reason = f"{flavour.name} multiplies by 4 bits on 8.0 and later; pass --quantize int8"
        elif float(target) < FLOAT8_SINCE and config.quantize == "fp8":
            reason = f"FP8 is read by GPUs of {FLOAT8_SINCE} and later; pass --quantize int8"
        else:
            continue
        raise ConfigError(f"--compute-capability {target}: {reason}")


def _choose_plugin(config: AnyConfig, flavour: Flavour | None, progress: Progress) -> str:
    """Return how LoRA nodes are implemented; an unavailable choice is an error."""
    wanted = config.lora_plugin
    if flavour is None or wanted == "native":
        return "native"
    if wanted == "aot" and not flavour.has_aot_plugins:
        raise ConfigError(
            f"--lora-plugin aot: {flavour.name} has no ahead-of-time plugins, TensorRT 10.10 and "
            "newer have; pass --lora-plugin plugin"
        )
    if not (obstacle := flavour.plugin_obstacle()):
        return "plugin" if wanted == "auto" else wanted
    if wanted == "plugin":
        raise ConfigError(f"--lora-plugin plugin: {obstacle}; pass --lora-plugin native")
    progress.note(f"LoRA is built as native matrix products (--lora-plugin native): {obstacle}")
    return "native"
