"""Kernels of a decode step of a traced model, by TensorRT-RTX's own list; no GPU is needed."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.models.graph_inputs import graph_inputs
from support.models.tiny_models import ARCHITECTURES
from transformers import LlamaConfig, LlamaForCausalLM

from trt_lora.builder.checks.lengths import Lengths
from trt_lora.builder.export.causal_lm import export_causal_lm
from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes.insert_lora import InsertLoRA
from trt_lora.builder.passes.linears import find_linears
from trt_lora.builder.passes.lowering.standard_attention import StandardAttention
from trt_lora.builder.passes.quantise_linears import QuantiseLinears
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.quantising.grid import CodeFormat, nearest_grid
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.builder.targets import Targets
from trt_lora.builder.tensorrt.build_log import Kernel
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.builder.tensorrt.profiles import make_profiles
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime.manifest import Range

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")

LAYERS, MAX_LEN = 2, 256
# Widths of SmolLM2-135M: at the smallest sizes TensorRT fuses otherwise.
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
TARGETS = Targets.from_names(["all-linear"])


@cache
def traced(dtype: torch.dtype) -> ir.Model:
    """A Llama of two layers whose cache is static, without LoRA; tests change copies of it."""
    fields: dict[str, Any] = (
        ARCHITECTURES["Llama"] | SIZES | {"num_key_value_heads": 3, "vocab_size": 96}
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**fields))
    return export_causal_lm(model.to(dtype), MAX_LEN).model


def kernels(model: ir.Model, lora_plugin: str, max_loras: int = 0) -> list[Kernel]:
    """What TensorRT runs in both profiles; attention is lowered in place."""
    StandardAttention()(model)
    lora, lengths = ResolvedLoRA(TARGETS, 64, 16, max_loras), Lengths(64, MAX_LEN)
    profiles = make_profiles(8, lengths, lora, graph_inputs(model))
    return built(model, lora_plugin, profiles)


@cache
def adapted(dtype: torch.dtype) -> list[Kernel]:
    """Those of the Llama with LoRA on all linears, one adapter at a time."""
    model = traced(dtype).clone()
    InsertLoRA(TARGETS, head="lm_head")(model)
    return kernels(model, "plugin")


def built(
    model: ir.Model, lora_plugin: str, profiles: Mapping[str, Mapping[str, Range]]
) -> list[Kernel]:
    compiler = Compiler(TENSORRT_RTX, NoProgress(), lora_plugin)
    return compiler.kernels(model, Path("m.onnx"), profiles)


def decoding(found: list[Kernel]) -> list[Kernel]:
    return [kernel for kernel in found if kernel.profile == 0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_layer_decodes_in_nine_kernels_and_in_four_more_with_lora(dtype: torch.dtype) -> None:
    plain, with_lora = kernels(traced(dtype).clone(), "native"), adapted(dtype)
    assert len(decoding(plain)) <= 9 * LAYERS + 4
    assert len(decoding(with_lora)) <= 13 * LAYERS + 4
    assert len({kernel.profile for kernel in plain}) == 2
    assert sum("mha" in kernel.name for kernel in decoding(plain)) == LAYERS  # one for attention
    copies = [sum(k.is_pad_copy for k in decoding(found)) for found in (plain, with_lora)]
    assert copies[0] == copies[1]  # no weight of LoRA is copied


def in_codes(bits: int, *, has_lora: bool = False) -> ir.Model:
    """The Llama in half precision, its weights in codes as a plan takes them."""
    model, weights = traced(torch.float16).clone(), {}
    for linear in find_linears(model):
        if not linear.refusal:
            values = gv.present(gv.present(linear.node.inputs[1]).const_value).numpy()
            weight = torch.from_numpy(values.T.astype(np.float32))
            block = 64 if bits == 4 else linear.k
            grid = nearest_grid(weight, CodeFormat(bits, block, torch.float16, is_signed=True))
            weights[linear.path] = grid.coded(grid.codes(weight)).split(64)
    if has_lora:
        InsertLoRA(TARGETS, head="lm_head")(model)
    QuantiseLinears(weights)(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "more"), [(4, 1), (8, 0)])
def test_codes_cost_a_kernel_a_layer_at_most_and_lora_four_as_ever(bits: int, more: int) -> None:
    floats = kernels(traced(torch.float16).clone(), "native")
    plain = kernels(in_codes(bits), "native")
    with_lora = kernels(in_codes(bits, has_lora=True), "plugin")
    counts = [len(decoding(found)) for found in (floats, plain, with_lora)]
    assert counts[1] <= counts[0] + more * LAYERS
    assert counts[2] <= counts[1] + 4 * LAYERS
    plugins = sum(kernel.name.startswith("lora_model") for kernel in decoding(with_lora))
    assert plugins == 4 * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_many_adapters_cost_one_kernel_more_than_one_and_none_a_layer(dtype: torch.dtype) -> None:
    """The one gives every token the slot of its row."""
    many = traced(dtype).clone()
    InsertLoRA(TARGETS, head="lm_head", stack_rank=64)(many)
    single, slots = adapted(dtype), kernels(many, "plugin", max_loras=8)
    for profile in (0, 1):
        counts = [sum(each.profile == profile for each in found) for found in (single, slots)]
        assert counts[1] <= counts[0] + 1
        plugins = [
            sum(each.profile == profile and each.name.startswith("lora_model") for each in found)
            for found in (single, slots)
        ]
        assert plugins == [4 * LAYERS] * 2
        copies = [
            sum(each.is_pad_copy for each in found if each.profile == profile)
            for found in (single, slots)
        ]
        assert copies[0] == copies[1]


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 8])
def test_vectors_cost_two_kernels_a_layer_at_most(slots: int) -> None:
    """A product and a sum fuse, with the rows of stacks too."""
    found = []
    for vectors in (False, True):
        model = traced(torch.float16).clone()
        stack_rank = 64 if slots else None
        InsertLoRA(TARGETS, head="lm_head", stack_rank=stack_rank, vectors=vectors)(model)
        found.append(decoding(kernels(model, "plugin", max_loras=slots)))
    assert len(found[1]) <= len(found[0]) + 2 * LAYERS
    plugins = [sum(each.name.startswith("lora_model") for each in some) for some in found]
    assert plugins == [4 * LAYERS] * 2


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 8])
def test_an_embedding_costs_few_kernels_and_none_a_layer(slots: int) -> None:
    """Rows of A, a product and a sum; with slots, where the rows are and whose they are."""
    found = []
    for embedding in ("", "model.embed_tokens"):
        model = traced(torch.float16).clone()
        names = ["all-linear", *(["embed_tokens"] if embedding else [])]
        insert = InsertLoRA(
            Targets.from_names(names),
            head="lm_head",
            stack_rank=64 if slots else None,
            embedding=embedding,
        )
        insert(model)
        found.append(decoding(kernels(model, "plugin", max_loras=slots)))
    assert len(found[0]) < len(found[1]) <= len(found[0]) + (5 if slots else 4)
