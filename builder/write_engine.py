"""Write the files of an engine directory: export, insert, save, compile, describe."""

import gc
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from trt_lora.builder.checkpoint.base_model import describe, output_widths
from trt_lora.builder.checkpoint.embedding_hashes import embedding_hashes
from trt_lora.builder.checkpoint.model_directory import CONFIG_FILE, TEXT_FILES, read_object
from trt_lora.builder.checks.encoder_decoder import RULES
from trt_lora.builder.checks.meta_model import embedding_path, head_path, is_tied
from trt_lora.builder.encoder_decoder import Part, export_parts
from trt_lora.builder.export.causal_lm import export_causal_lm
from trt_lora.builder.load_base import load_base
from trt_lora.builder.passes.clear_metadata import ClearMetadata
from trt_lora.builder.passes.codes.coded_products import gathers_of
from trt_lora.builder.passes.codes.coded_weight import coded_values
from trt_lora.builder.passes.insert_lora import InsertLoRA, InsertLoRAResult
from trt_lora.builder.passes.quantise_linears import QuantiseLinears
from trt_lora.builder.progress import Progress
from trt_lora.builder.resolved import ResolvedBuild
from trt_lora.builder.save_graphs import (
    Bindings,
    bindings_of,
    save_encoder_decoder,
    save_graphs,
    save_manifest,
)
from trt_lora.builder.stored_matrices import stored_matrices
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.builder.tensorrt.profiles import encoder_profiles, make_profiles
from trt_lora.builder.tensorrt.second_stream import with_second_stream
from trt_lora.builder.trial_step import try_onnx_files
from trt_lora.builder.versions import tool_versions
from trt_lora.plugins.contract.modules import is_embedding, is_head, target_names
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.adapters.fitting.base_check import compare_copies
from trt_lora.runtime.adapters.fitting.trained_biases import with_bias_differences
from trt_lora.runtime.files.base_weights import BaseWeight
from trt_lora.runtime.files.stored_matrix import StoredMatrix
from trt_lora.runtime.generation.parameters.default_sampling import (
    GENERATION_FILE,
    default_sampling,
)
from trt_lora.runtime.manifest import ENCODER_FILES, ONNX_FILE, PLAN_FILE, EncoderPart, Manifest
from trt_lora.runtime.weight_format import WeightFormat


@dataclass(frozen=True)
class Graph:
    """The graph with its LoRA inputs, and what export and pass reported."""

    model: ir.Model
    inserted: InsertLoRAResult
    embeddings: Mapping[str, BaseWeight]
    weights: Mapping[str, WeightFormat]  # of the linears that are read as codes
    encoder: Part | None = None  # None: a decoder alone
    tied_head: str = ""  # path of an output head that has the embedding's weight


def write_engine(build: ResolvedBuild, work: Path, progress: Progress) -> Manifest:
    """Fill the directory `work` with an engine and return its manifest.

    Raises:
        ModelError: the base model cannot be loaded, exported or compiled, or an ONNX file of it
            does not run.
        ConfigError: a target matches no linear of the graph.
        AdapterError: an adapter of the options has trained copies of base weights.
    """
    config, model = build.config, build.model
    graph = make_graph(build, progress)
    weights = graph.weights
    base = replace(
        describe(model.checkpoint, model.config),
        embeddings=graph.embeddings,
        tied_head=graph.tied_head,
    )
    tokens = config.max_batch_size * model.lengths.max_input_len
    sites, step, encoder = _save(graph, work, config.quantize_level, tokens, progress)
    del graph
    gc.collect()  # the exporter's graphs hold the weights in cycles; TensorRT needs the room
    saved = [s for s in sites if target_names(s.path) & {*build.lora.saved}]
    widths = {config.binding_names.rank_symbol(site.path): site.width for site in saved}
    profiles = make_profiles(config.max_batch_size, model.lengths, build.lora, step.inputs, widths)
    part = _encoder_part(build, encoder)
    manifest = Manifest(
        base_model=base,
        binding_names=config.binding_names,
        sites=tuple(replace(s, parts=output_widths(model.config, s.path, s.n)) for s in sites),
        inputs=step.inputs,
        outputs=step.outputs,
        profiles=profiles,
        max_batch_size=config.max_batch_size,
        max_input_len=model.lengths.max_input_len,
        max_seq_len=model.lengths.max_seq_len,
        max_lora_rank=build.lora.max_rank,
        opt_lora_rank=build.lora.opt_rank,
        max_loras=build.lora.max_loras,
        lora_vectors=build.lora.vectors,
        saved_modules=tuple(site.path for site in saved),
        matrices=_matrices(build, sites, saved, work / ONNX_FILE),
        dtype=config.dtype,
        flavour=build.flavour.name if build.flavour else "none",
        lora_plugin=build.lora_plugin,
        compute_capability=config.compute_capability,
        weights=weights,
        encoder=part,
        versions=tool_versions(),
        files={},
    )
    if config.lora_streams > 1:
        manifest = with_second_stream(manifest)
    tools = _compile(build, work, manifest, progress)
    progress.stage("describe")
    _copy_text_files(config.model, work, progress, RULES if part else ())
    manifest = save_manifest(manifest, tools, work)
    progress.stage("try")
    try_onnx_files(work, config.output, manifest, progress)
    return manifest


def _matrices(
    build: ResolvedBuild, sites: Collection[Site], saved: Collection[Site], file: Path
) -> dict[str, StoredMatrix]:
    """What vectors, trained tokens and saved modules need of the weights."""
    spell = build.config.binding_names.binding
    ends = [*saved, *(site for site in sites if is_embedding(site.path))]
    tables = {site.path: spell("A", site.path) for site in ends}
    if not tables and not build.lora.vectors:
        return {}
    found = stored_matrices(file, tables)
    return {
        path: matrix
        for path, matrix in found.items()
        if build.lora.vectors or is_embedding(path) or is_head(path)
    }


def _save(
    graph: Graph, work: Path, level: str, tokens: int, progress: Progress
) -> tuple[tuple[Site, ...], Bindings, Bindings | None]:
    """Write the ONNX files and let go of the weights; return the sites, and what graphs take."""
    progress.stage("save")
    ClearMetadata()(graph.model)
    if graph.encoder is None:
        save_graphs(graph.model, work, level, tokens)
        return graph.inserted.sites, bindings_of(graph.model.graph), None
    ClearMetadata()(graph.encoder.model)
    save_encoder_decoder(graph.encoder.model, graph.model, work)
    sites = (*graph.inserted.sites, *graph.encoder.inserted.sites)
    return sites, bindings_of(graph.model.graph), bindings_of(graph.encoder.model.graph)


def _encoder_part(build: ResolvedBuild, encoder: Bindings | None) -> EncoderPart | None:
    checked = build.model
    if encoder is None or checked.rules is None:
        return None
    return EncoderPart(
        inputs=encoder.inputs,
        outputs=encoder.outputs,
        profiles=encoder_profiles(checked.lengths, build.lora, encoder.inputs),
        max_source_len=checked.lengths.max_source_len,
        rules=checked.rules,
    )


def make_graph(build: ResolvedBuild, progress: Progress, floats: Collection[str] = ()) -> Graph:
    """Export the base model and give it LoRA inputs; nothing is written.

    Args:
        build: with nothing left to decide.
        progress: told the stages.
        floats: names of linears in a checkpoint in codes that a graph cannot read as codes.

    Raises:
        ModelError: the model cannot be loaded or exported.
        ConfigError: a target matches no linear of the model.
        AdapterError: an adapter of the options has trained copies of base weights.
    """
    config, lora, checked = build.config, build.lora, build.model
    base = load_base(build, progress, floats)
    model, codes = base.model, base.codes
    embeddings = embedding_hashes(checked.checkpoint, model, with_biases=lora.vectors)
    sites, head = {site.path for site in checked.sites.sites}, head_path(model)
    for adapter in lora.adapters:
        adapter = with_bias_differences(adapter, lambda _: (), sites)
        few = [path for path, rows in adapter.tokens.items() if rows.ids]
        if is_tied(model) and any(map(is_embedding, few)) and head not in sites:
            raise AdapterError(
                f"{adapter.source}: trained tokens change the output head too, which has the "
                "embedding's weight; add lm_head to --lora-target-modules"
            )
        for name, reason in compare_copies(adapter, embeddings)[1].items():
            raise AdapterError(f"{adapter.source}: {name} cannot be used: {reason}")
    progress.stage("export")
    if checked.checkpoint.is_encoder_decoder:
        encoder, step = export_parts(build, model)
        return Graph(step.model, step.inserted, embeddings, {}, encoder)
    exported = export_causal_lm(model, checked.lengths.max_seq_len)
    progress.stage("insert")
    linears = exported.linears
    insert = InsertLoRA(
        lora.targets,
        config.binding_names,
        head,
        linears,
        lora.stack_rank,
        lora.vectors,
        embedding_path(model),
        lora.saved,
    )
    inserted = insert(exported.model)
    assert isinstance(inserted, InsertLoRAResult)
    tied = {head: embedding_path(model)} if is_tied(model) else {}
    QuantiseLinears({path: linear.weight for path, linear in codes.items()}, tied)(exported.model)
    if base.stand_ins and (computed := base.stand_ins.read_by(exported.model.graph)):
        return make_graph(build, progress, {*floats, *computed})
    for note in base.notes:
        progress.note(note)
    coded = {path for path in codes if f"{path}.codes" in exported.model.graph.initializers}
    for path in codes.keys() - coded:
        if linears.get(path):  # else the logits do not need it
            progress.note(f"{path} keeps its weight in {config.dtype}: the graph computes it")
    shared = {path for path, value in coded_values(exported.model) if [*gathers_of(value)]}
    formats = {
        path: linear.format(config.quantize_level, tied[path] if path in shared else "")
        for path, linear in codes.items()
        if path in coded
    }
    return Graph(exported.model, inserted, embeddings, formats, tied_head=head if tied else "")


def _compile(
    build: ResolvedBuild, work: Path, manifest: Manifest, progress: Progress
) -> dict[str, str]:
    flavour = build.flavour
    if flavour is None:
        return {}
    progress.stage("compile")
    config = build.config
    compiler = Compiler(
        flavour,
        progress,
        build.lora_plugin,
        config.timing_cache,
        config.compute_capability,
        manifest.second_stream,
    )
    if manifest.encoder is not None:
        files, of_encoder = ENCODER_FILES, replace(compiler, second_stream=False)
        of_encoder.compile(work / files.onnx, work / files.plan, manifest.encoder.profiles)
    return {flavour.name: compiler.compile(work / ONNX_FILE, work / PLAN_FILE, manifest.profiles)}


def _copy_text_files(
    model: Path, work: Path, progress: Progress, rules: Collection[str] = ()
) -> None:
    """Copy what is read beside a model; `rules` are fields that the manifest has instead."""
    for name in (*TEXT_FILES, GENERATION_FILE, CONFIG_FILE):  # servers and clients read the last
        if (model / name).is_file():
            shutil.copyfile(model / name, work / name)
    generation = work / GENERATION_FILE
    if rules and generation.is_file():
        fields = {n: value for n, value in read_object(generation).items() if n not in rules}
        generation.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    try:
        default_sampling(work)
    except ConfigError as error:
        progress.note(f"the model's sampling defaults are refused: {error}")
    if not (work / TEXT_FILES[0]).is_file():
        progress.note(f"{model} has no {TEXT_FILES[0]}: the engine takes token ids, not text")
