"""The two graphs of an encoder-decoder, with their LoRA inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from trt_lora.builder.checks.meta_model import head_path
from trt_lora.builder.export.causal_lm import export_module
from trt_lora.builder.export.encoder_decoder import DecoderStep, EncoderStep
from trt_lora.builder.export.torch_modules import untie_linears
from trt_lora.builder.passes.insert_lora import InsertLoRA, InsertLoRAResult
from trt_lora.builder.resolved import ResolvedBuild
from trt_lora.builder.targets import check_targets_matched
from trt_lora.plugins.contract.operators import COLUMNS
from trt_lora.plugins.contract.slots import LORA_RANK, SLOTS
from trt_lora.plugins.contract.step import SOURCE_LENGTHS


@dataclass(frozen=True)
class Part:
    """One of the graphs, and what the pass reported."""

    model: ir.Model
    inserted: InsertLoRAResult


def export_parts(build: ResolvedBuild, model: Any) -> tuple[Part, Part]:
    """Return the encoder and the step of a `PreTrainedModel`, with LoRA inputs.

    Raises:
        ModelError: the model cannot be traced.
        ConfigError: a target matches no linear of either.
    """
    lengths, lora = build.model.lengths, build.lora
    untie_linears(model)
    encoder = export_module(model, EncoderStep(model, lengths.max_source_len))
    step = export_module(model, DecoderStep(model, lengths.max_seq_len, lengths.max_source_len))
    _drop_unread(step.model.graph)
    own = {path: True for path, is_traced in encoder.linears.items() if is_traced}
    others = {path: is_read for path, is_read in step.linears.items() if path not in own}
    parts = [
        _with_lora(build, exported.model, head_path(model), modules)
        for exported, modules in ((encoder, own), (step, others))
    ]
    found = [part.inserted for part in parts]
    left_alone = [each for result in found for each in result.left_alone]
    check_targets_matched(lora.targets, [s for r in found for s in r.sites], left_alone)
    first, second = parts
    _share_ranks(first, second)
    return first, second


def _with_lora(
    build: ResolvedBuild, model: ir.Model, head: str, modules: Mapping[str, bool]
) -> Part:
    lora, names = build.lora, build.config.binding_names
    insert = InsertLoRA(lora.targets, names, head, modules, lora.stack_rank, is_part=True)
    inserted = insert(model)
    assert isinstance(inserted, InsertLoRAResult)
    return Part(model, inserted)


def _drop_unread(graph: ir.Graph) -> None:
    """Take the lengths of sources from a graph whose sources are all of one."""
    for value in [v for v in graph.inputs if v.name == SOURCE_LENGTHS and not v.uses()]:
        graph.inputs.remove(value)


def _share_ranks(encoder: Part, step: Part) -> None:
    """Let both graphs read one input of ranks [slots, sites], the step's sites first."""
    first = len(step.inserted.sites)
    total = first + len(encoder.inserted.sites)
    for part, offset in ((encoder, first), (step, 0)):
        for value in part.model.graph.inputs:
            if value.name == LORA_RANK:
                value.shape = ir.Shape([SLOTS, total])
        for node in part.model.graph:
            if columns := node.attributes.get_ints(COLUMNS, ()):
                node.attributes[COLUMNS] = ir.AttrInt64s(COLUMNS, [c + offset for c in columns])
