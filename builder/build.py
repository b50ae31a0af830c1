"""Build an engine directory: export, insert, save, compile, describe; published in one step."""

import errno
import gc
import importlib.metadata
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from trt_lora.builder.base_model import describe, load_model, output_widths, read_config
from trt_lora.builder.compile import Compiler
from trt_lora.builder.config import BuildConfig
from trt_lora.builder.dtypes import dtype_name
from trt_lora.builder.export import export_causal_lm
from trt_lora.builder.insert_lora import InsertLoRA, InsertLoRAResult
from trt_lora.builder.lora_plan import LoRAPlan, plan_lora
from trt_lora.builder.model_directory import TEXT_FILES
from trt_lora.builder.profiles import make_profiles
from trt_lora.builder.progress import Progress, Silent
from trt_lora.builder.strip_metadata import strip_metadata
from trt_lora.builder.unsupported import check_supported
from trt_lora.plugins.contract import Site
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.flavour import Flavour, flavour_named, installed_flavour
from trt_lora.runtime.file_record import file_record
from trt_lora.runtime.files import publish_directory
from trt_lora.runtime.manifest import (
    MANIFEST_FILE,
    ONNX_FILE,
    ONNX_WEIGHTS_FILE,
    PLAN_FILE,
    Binding,
    Manifest,
    Range,
)

_TOOLS = ("trt-lora", "torch", "transformers", "onnx-ir", "onnxscript")


@dataclass(frozen=True)
class Graph:
    """The graph with its LoRA inputs, and what the pass reported."""

    model: ir.Model
    inserted: InsertLoRAResult


def build_engine(config: BuildConfig, progress: Progress | None = None) -> Manifest:
    """Build the engine directory `config.output` and return its manifest.

    The directory appears when everything in it is complete; a build that fails or is interrupted
    leaves nothing behind.

    Raises:
        ConfigError: an option is wrong, or `config.output` exists and `config.force` is not set.
        ModelError: the base model cannot be loaded, exported or compiled.
        AdapterError: an adapter in `config.lora_dirs` cannot be read.
        BackendError: the flavour asked for is not installed.
    """
    progress = progress or Silent()
    _check_output(config)
    plan, flavour = plan_lora(config), _choose_flavour(config, progress)
    lora_plugin = _choose_plugin(config, flavour, progress)
    model_config = read_config(config.model)
    _check_length(config, model_config)
    with publish_directory(config.output) as work:
        graph = make_graph(config, plan, progress)
        sites, inputs, outputs = _save(graph, work, flavour, progress)
        del graph
        gc.collect()  # the exporter's graphs hold the weights in cycles; TensorRT needs the room
        profiles = make_profiles(config, plan, inputs)
        versions = tool_versions() | _compile(
            config, flavour, work, profiles, progress, lora_plugin
        )
        progress.stage("describe")
        _copy_text_files(config.model, work, progress)
        manifest = Manifest(
            base_model=describe(config.model, model_config),
            binding_names=config.binding_names,
            sites=tuple(_with_parts(site, model_config) for site in sites),
            inputs=inputs,
            outputs=outputs,
            profiles=profiles,
            max_batch_size=config.max_batch_size,
            max_input_len=config.max_input_len,
            max_seq_len=config.max_seq_len,
            max_lora_rank=plan.max_rank,
            opt_lora_rank=plan.opt_rank,
            dtype=config.dtype,
            flavour=flavour.name if flavour else "none",
            lora_plugin=lora_plugin,
            versions=versions,
            files={path.name: file_record(path) for path in sorted(work.iterdir())},
        )
        (work / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _save(
    graph: Graph, work: Path, flavour: Flavour | None, progress: Progress
) -> tuple[tuple[Site, ...], tuple[Binding, ...], tuple[Binding, ...]]:
    """Write the ONNX file; return its sites, inputs and outputs."""
    progress.stage("save")
    _check_space(graph.model, work, flavour)
    strip_metadata(graph.model)
    ir.save(graph.model, work / ONNX_FILE, external_data=ONNX_WEIGHTS_FILE)
    values = graph.model.graph
    return graph.inserted.sites, _bindings(values.inputs), _bindings(values.outputs)


def _with_parts(site: Site, model_config: Any) -> Site:
    return replace(site, parts=output_widths(model_config, site.path, site.n))


def list_sites(config: BuildConfig, progress: Progress | None = None) -> InsertLoRAResult:
    """Return where `build_engine` would insert LoRA, and what it would leave alone and why.

    Raises:
        ConfigError: a target matches no linear of the model.
        ModelError: the model cannot be loaded or exported.
        AdapterError: an adapter in `config.lora_dirs` cannot be read.
    """
    read_config(config.model)
    return make_graph(config, plan_lora(config), progress or Silent()).inserted


def make_graph(config: BuildConfig, plan: LoRAPlan, progress: Progress) -> Graph:
    """Export the base model and give it LoRA inputs; nothing is written.

    Raises:
        ModelError: the model cannot be loaded or exported.
        ConfigError: a target matches no linear of the model.
    """
    progress.stage("load")
    model = load_model(config.model, config.dtype)
    check_supported(model)
    progress.stage("export")
    exported = export_causal_lm(model)
    progress.stage("insert")
    head = model.get_output_embeddings()
    head_path = next((path for path, module in model.named_modules() if module is head), "")
    insert = InsertLoRA(plan.targets, config.binding_names, head_path, exported.linears)
    inserted = insert(exported.model)
    assert isinstance(inserted, InsertLoRAResult)
    return Graph(exported.model, inserted)


def _check_output(config: BuildConfig) -> None:
    output = config.output
    if not output.exists():
        return
    if not config.force:
        raise ConfigError(f"{output} exists; choose another --output, or replace it with --force")
    is_empty = output.is_dir() and not any(output.iterdir())
    if not is_empty and not (output / MANIFEST_FILE).is_file():
        raise ConfigError(f"{output} is not an engine directory; --force replaces nothing else")


def _check_length(config: BuildConfig, model_config: Any) -> None:
    limit = getattr(model_config, "max_position_embeddings", None)
    if limit is not None and config.max_seq_len > limit:
        raise ConfigError(
            f"--max-seq-len is {config.max_seq_len}, but the model has {limit} positions; "
            f"pass --max-seq-len {limit} or less"
        )


def _choose_flavour(config: BuildConfig, progress: Progress) -> Flavour | None:
    if config.flavour == "none":
        return None
    if config.flavour != "auto":
        flavour = flavour_named(config.flavour)
        flavour.load()  # fail before the export, which takes minutes
        return flavour
    found = installed_flavour()
    if found is None:
        progress.note("no TensorRT is installed: only the ONNX file is made (as --flavour none)")
    return found


def _choose_plugin(config: BuildConfig, flavour: Flavour | None, progress: Progress) -> str:
    """What LoRA nodes become; what is asked for and cannot be is an error."""
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


def _check_space(model: ir.Model, work: Path, flavour: Flavour | None) -> None:
    constants = (value.const_value for value in model.graph.initializers.values())
    weights = sum(constant.nbytes for constant in constants if constant is not None)
    needed, free = weights * (2 if flavour else 1), shutil.disk_usage(work).free
    if free < needed:
        room = f"the engine needs about {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free"
        raise OSError(errno.ENOSPC, room)


def _bindings(values: Iterable[ir.Value]) -> tuple[Binding, ...]:
    return tuple(_binding(value) for value in values)


def _binding(value: ir.Value) -> Binding:
    assert value.shape is not None  # the export names them all
    assert value.dtype is not None
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return Binding(str(value.name), dtype_name(value.dtype), shape)


def _compile(
    config: BuildConfig,
    flavour: Flavour | None,
    work: Path,
    profiles: Mapping[str, Mapping[str, Range]],
    progress: Progress,
    lora_plugin: str,
) -> dict[str, str]:
    if flavour is None:
        return {}
    progress.stage("compile")
    compiler = Compiler(flavour, progress, lora_plugin, config.timing_cache)
    return {flavour.name: compiler.compile(work / ONNX_FILE, work / PLAN_FILE, profiles)}


def _copy_text_files(model: Path, work: Path, progress: Progress) -> None:
    for name in TEXT_FILES:
        if (model / name).is_file():
            shutil.copyfile(model / name, work / name)
    if not (work / TEXT_FILES[0]).is_file():
        progress.note(f"{model} has no {TEXT_FILES[0]}: the engine takes token ids, not text")


def tool_versions() -> dict[str, str]:
    """Return the versions of what exports a model, this package first."""
    return {tool: importlib.metadata.version(tool) for tool in _TOOLS}
