"""Write the files of an engine directory of a graph: read, insert, save, compile, describe, try."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.graphs.config import GraphConfig, ResolvedGraph
from trt_lora.builder.graphs.read_graph import ReadGraph, describe_graph, read_graph
from trt_lora.builder.graphs.shapes import PROFILE, graph_profile, read_shapes
from trt_lora.builder.graphs.targets import GraphTargets, check_graph_targets
from trt_lora.builder.passes.clear_metadata import ClearMetadata
from trt_lora.builder.passes.foreign.find_linears import find_graph_linears, fused_widths
from trt_lora.builder.passes.foreign.names import ModuleNames
from trt_lora.builder.passes.foreign.site_map import read_site_map
from trt_lora.builder.passes.foreign.weights import MICROSOFT
from trt_lora.builder.passes.insert_lora import InsertLoRA, InsertLoRAResult
from trt_lora.builder.progress import Progress
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.builder.save_graphs import Bindings, bindings_of, save_manifest
from trt_lora.builder.targets import LeftAlone, SiteList
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.builder.trial_step import try_graph
from trt_lora.builder.versions import tool_versions
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import listed
from trt_lora.runtime.adapters.fitting.no_effect import NO_EFFECT
from trt_lora.runtime.manifest import GRAPH, ONNX_FILE, ONNX_WEIGHTS_FILE, PLAN_FILE, Manifest


def write_graph(build: ResolvedGraph, work: Path, progress: Progress) -> Manifest:
    """Fill the directory `work` with an engine and return its manifest.

    Raises:
        ModelError: the file cannot be read, compiled or run.
        ConfigError: a target matches no linear of the graph, or a size has no range.
    """
    config, lora = build.config, build.lora
    progress.stage("load")
    graph = read_graph(config.onnx, config.dtype, config.outputs)
    model = graph.model
    progress.stage("insert")
    listing = insert_into_graph(graph, config, lora)
    if unnamed := [item for item in listing.left_alone if "--site-map" in item.reason]:
        progress.note(f"{len(unnamed)} linears have no name and take no LoRA: --dry-run lists them")
    if build.flavour is not None:
        _check_operators(model)
    bindings = _save(model, work, progress)
    manifest = _manifest(build, listing.sites, bindings, graph.no_effect)
    tools = _compile(build, work, manifest, progress)
    progress.stage("describe")
    manifest = save_manifest(manifest, tools, work)
    progress.stage("try")
    try_graph(work, config.output, manifest, progress)
    return manifest


def insert_into_graph(graph: ReadGraph, config: GraphConfig, lora: ResolvedLoRA) -> SiteList:
    """Give a graph its LoRA inputs in place, and return the sites and what is left alone.

    A target that no output depends on is left alone.

    Raises:
        ConfigError: a target matches no linear of the graph.
    """
    model, site_map = graph.model, read_site_map(config.site_map)
    linears = [*find_graph_linears(model, ModuleNames(config.path_prefix, site_map))]
    parts = {each.path: site_map.widths(each.path) or fused_widths(each) for each in linears}
    kernels = {each.path for each in linears if each.window and each.window.taps > 1}
    targets = GraphTargets(lora.targets.modules, frozenset(kernels))
    insert = InsertLoRA(targets, config.binding_names, is_part=True, linears=linears)
    result = insert(model)
    assert isinstance(result, InsertLoRAResult)
    sites = tuple(replace(site, parts=parts[site.path]) for site in result.sites)
    for site in sites:
        if site.parts and sum(site.parts) != site.n:
            raise ConfigError(
                f"--site-map: the parts {[*site.parts]} of {site.path} are not {site.n} together"
            )
    dead = [path for path in graph.no_effect if targets.includes(path)]
    check_graph_targets(targets, sites, result.left_alone, dead)
    idle = (LeftAlone(path, NO_EFFECT) for path in dead)
    return SiteList(sites, (*result.left_alone, *idle))


def _check_operators(model: ir.Model) -> None:
    """Refuse a plan of what ONNX Runtime alone runs."""
    own = {node.op_type for node in model.graph.all_nodes() if node.domain == MICROSOFT}
    if own:
        raise ConfigError(
            f"the graph has operators of ONNX Runtime's own ({listed(sorted(own))}), which "
            "TensorRT does not read; pass --flavour none"
        )


def _save(model: ir.Model, work: Path, progress: Progress) -> Bindings:
    """Write the ONNX file with its weights beside it, and let go of them."""
    progress.stage("save")
    ClearMetadata()(model)
    ir.save(model, work / ONNX_FILE, external_data=ONNX_WEIGHTS_FILE)
    (work / ONNX_WEIGHTS_FILE).touch()  # a graph may have none that is large enough to be there
    found = bindings_of(model.graph)
    return replace(found, outputs=tuple(replace(o, in_place_of="") for o in found.outputs))


def _manifest(
    build: ResolvedGraph, sites: Iterable[Site], bindings: Bindings, no_effect: tuple[str, ...]
) -> Manifest:
    config, lora, sites = build.config, build.lora, tuple(sites)
    (dtype, _), *_ = Counter(site.dtype for site in sites).most_common()
    manifest = Manifest(
        base_model=describe_graph(config.onnx),
        binding_names=config.binding_names,
        sites=sites,
        inputs=bindings.inputs,
        outputs=bindings.outputs,
        profiles={},
        max_lora_rank=lora.max_rank,
        opt_lora_rank=lora.opt_rank,
        dtype=dtype,
        flavour=build.flavour.name if build.flavour else "none",
        lora_plugin=build.lora_plugin,
        compute_capability=config.compute_capability,
        versions=tool_versions(),
        files={},
        component=config.component,
        no_effect=no_effect,
        kind=GRAPH,
    )
    if build.flavour is None and not config.shapes:
        return manifest
    symbols = read_shapes(config.shapes)
    ranges = graph_profile(manifest.inputs, manifest.lora_inputs, symbols, lora)
    return replace(manifest, profiles={PROFILE: ranges})


def _compile(
    build: ResolvedGraph, work: Path, manifest: Manifest, progress: Progress
) -> dict[str, str]:
    flavour, config = build.flavour, build.config
    if flavour is None:
        return {}
    _check_outputs(manifest)
    progress.stage("compile")
    compiler = Compiler(
        flavour,
        progress,
        build.lora_plugin,
        config.timing_cache,
        config.compute_capability,
        has_own_codes=False,
    )
    return {flavour.name: compiler.compile(work / ONNX_FILE, work / PLAN_FILE, manifest.profiles)}


def _check_outputs(manifest: Manifest) -> None:
    """Refuse a plan whose outputs have sizes that the inputs' do not tell: a run could not hold it.

    Raises:
        ConfigError: an output has one.
    """
    known = {size for binding in manifest.inputs for size in binding.shape}
    for output in manifest.outputs:
        if odd := [size for size in output.shape if isinstance(size, str) and size not in known]:
            raise ConfigError(
                f"output {output.name} has a size {odd[0]!r} that no input has, so that a plan's "
                "memory for it is not known; export it with that name at an input, or pass "
                "--flavour none"
            )
