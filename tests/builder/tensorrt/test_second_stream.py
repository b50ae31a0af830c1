"""A plan's hidden output, and the stream that LoRA nodes get by it; TensorRT-RTX's own list."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import TinyEngine
from support.fakes.fake_engine import make_manifest
from support.models.graph_inputs import graph_inputs
from support.models.quick_build import quick_build
from support.models.tiny_models import ARCHITECTURES, tiny_config
from transformers import LlamaConfig, LlamaForCausalLM

from trt_lora.builder.checks.lengths import Lengths
from trt_lora.builder.export.causal_lm import export_causal_lm
from trt_lora.builder.passes.insert_lora import InsertLoRA
from trt_lora.builder.passes.lowering.standard_attention import StandardAttention
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.resolved_lora import ResolvedLoRA
from trt_lora.builder.targets import Targets
from trt_lora.builder.tensorrt import second_stream
from trt_lora.builder.tensorrt.build_log import Kernel
from trt_lora.builder.tensorrt.compile import Compiler
from trt_lora.builder.tensorrt.profiles import make_profiles
from trt_lora.builder.tensorrt.second_stream import add_second_stream, with_second_stream
from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime.manifest import PLAN_FILE, Binding, Manifest

ROWS, MAX_LEN = 8, 1024
# The keys of a layer are 16 MiB, as those of Llama-3-8B are with as many rows and tokens.
SIZES = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
TARGETS = Targets.from_names(["all-linear"])


def decode_kernels(layers: int, *, has_output: bool) -> list[Kernel]:
    fields: dict[str, Any] = ARCHITECTURES["Llama"] | SIZES
    fields |= {"vocab_size": 96, "intermediate_size": 512, "num_hidden_layers": layers}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**fields, dtype=torch.float16))
    graph = export_causal_lm(model.half(), MAX_LEN).model
    InsertLoRA(TARGETS, head="lm_head")(graph)
    StandardAttention()(graph)
    lora, lengths = ResolvedLoRA(TARGETS, 64, 16, 0), Lengths(64, MAX_LEN)
    profiles = make_profiles(ROWS, lengths, lora, graph_inputs(graph))
    compiler = Compiler(TENSORRT_RTX, NoProgress(), "plugin", second_stream=has_output)
    return compiler.kernels(graph, Path("m.onnx"), {"decode": profiles["decode"]})


def streams(kernels: list[Kernel]) -> list[int]:
    return [kernel.stream for kernel in kernels if kernel.kind == "custom_layer"]


@pytest.mark.slow
def test_without_it_all_nodes_decode_behind_their_products_and_with_it_beside() -> None:
    """But those of the first q, k and v; for one kernel more."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    plain, second = (decode_kernels(2, has_output=takes) for takes in (False, True))
    assert streams(plain) == [0] * 8
    assert streams(second) == [0] + [1] * 7
    assert len(second) == len(plain) + 1


@pytest.mark.slow
def test_it_holds_for_thirty_layers() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    assert streams(decode_kernels(30, has_output=True)) == [0] + [1] * 119


@pytest.mark.slow
@pytest.mark.parametrize("asked", [2, 1])
def test_a_build_makes_what_its_manifest_says(
    asked: int, tiny_engine: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    monkeypatch.setattr(second_stream, "_LEAST_BYTES", 1)
    config = tiny_config(
        tiny_engine.model, tmp_path / "engine", flavour="tensorrt-rtx", lora_streams=asked
    )
    manifest = quick_build(config)
    has_output = b"second_stream" in (tmp_path / "engine" / PLAN_FILE).read_bytes()
    assert manifest.second_stream is has_output is (asked == 2)
    assert "second_stream" not in {output.name for output in manifest.outputs}


def test_the_output_is_one_value_of_each_row_and_head() -> None:
    keys = ir.val("cache.0.key", ir.DataType.FLOAT16, ["batch", 3, 256, 64])
    model = ir.Model(ir.Graph([keys], [], nodes=[], opset_imports={"": 24}), ir_version=10)
    add_second_stream(model)
    (output,) = model.graph.outputs
    assert (output.name, output.dtype) == ("second_stream", ir.DataType.FLOAT16)
    assert str(output.shape) == "[batch,3,1,1]"
    assert [node.op_type for node in model.graph] == ["Constant"] * 3 + ["Slice"]
    feed = np.random.default_rng(0).normal(size=(2, 3, 256, 64)).astype(np.float16)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    found: Any = session.run(None, {"cache.0.key": feed})[0]
    assert np.array_equal(found, feed[:, :, :1, :1])


def test_a_graph_without_a_cache_is_refused() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 24}), ir_version=10)
    with pytest.raises(ir.passes.PreconditionError, match=r"no input cache\.0\.key"):
        add_second_stream(model)


def large(rows: int = ROWS, **changes: Any) -> Manifest:
    """The manifest of an engine with a layer's keys of 1 MiB a row."""
    keys = Binding("cache.0.key", "float16", ("batch", 8, 1024, 64))
    base = replace(make_manifest(), inputs=(keys,), max_batch_size=rows, lora_plugin="plugin")
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("manifest", "takes"),
    [
        (large(), True),
        (large(rows=7), False),
        (large(inputs=()), False),
        (large(lora_plugin="native"), False),
        (large(lora_plugin="aot"), False),
        (large(max_loras=8), False),
        (large(binding_names=BindingNames.EDGELLM), False),
    ],
)
def test_a_plan_takes_it_where_it_can_do_something(manifest: Manifest, *, takes: bool) -> None:
    assert with_second_stream(manifest).second_stream is takes
