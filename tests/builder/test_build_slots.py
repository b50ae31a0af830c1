"""Engines for many adapters: what is built of the options, and what is refused."""

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from conftest import TinyEngine
from support.models.quick_build import quick_build
from support.models.tiny_models import tiny_config

from trt_lora.builder.progress import NoProgress
from trt_lora.builder.tensorrt.kernel_counts import kernel_layouts
from trt_lora.plugins.contract.operators import COLUMNS, DOMAIN
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import Manifest, read_manifest
from trt_lora.runtime.manifest import ONNX_FILE, Range

Q = "model.layers.0.self_attn.q_proj"


def built(engine: TinyEngine, output: Path, **options: Any) -> Manifest:
    """An engine with LoRA on q_proj and v_proj, and three slots unless told otherwise."""
    targets = ("attn_q", "attn_v")
    config = tiny_config(
        engine.model, output, **{"target_modules": targets, "max_loras": 3} | options
    )
    return quick_build(config)


def test_the_manifest_names_stacks_slots_and_ranks(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    manifest = built(tiny_engine, tmp_path / "engine")
    assert read_manifest(tmp_path / "engine") == manifest
    assert (manifest.lora_mode, manifest.max_loras, manifest.lora_plugin) == ("slots", 3, "native")
    shapes = {binding.name: (binding.dtype, binding.shape) for binding in manifest.inputs}
    assert shapes[f"lora_A_{Q}"] == ("float32", ("slots", 32, 16))
    assert shapes[f"lora_B_{Q}"] == ("float32", ("slots", 16, 32))
    assert shapes["lora_slot"] == ("int32", ("slot_rows",))
    assert shapes["lora_rank"] == ("int32", ("slots", 4))
    for ranges in manifest.profiles.values():
        assert ranges[f"lora_A_{Q}"] == Range((1, 32, 16), (3, 32, 16), (3, 32, 16))
        assert ranges["lora_slot"] == Range((1,), (1,), (2,))
        assert ranges["lora_rank"] == Range((1, 4), (3, 4), (3, 4))


def test_the_rank_of_the_stacks_is_a_power_of_two(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    assert built(tiny_engine, tmp_path / "e", max_lora_rank=9).max_lora_rank == 16


def test_an_engine_for_one_adapter_is_as_before(tiny_engine: TinyEngine) -> None:
    manifest = read_manifest(tiny_engine.engine)
    assert (manifest.lora_mode, manifest.max_loras) == ("single", 0)
    assert "lora_slot" not in {binding.name for binding in manifest.inputs}
    operators = {key[1] for key in ir.load(tiny_engine.engine / ONNX_FILE).functions}
    assert operators == {"LoraAdd2", "LoraDelta2"} & operators
    assert operators


@pytest.mark.slow
@pytest.mark.parametrize("lora_plugin", ["plugin", "native"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensorrt_builds_the_plugin_or_the_function_bodies(
    tiny_engine: TinyEngine, tmp_path: Path, dtype: str, lora_plugin: str
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    options = {"flavour": "tensorrt-rtx", "dtype": dtype}
    if lora_plugin == "native":  # the plugin is what `auto` takes
        options["lora_plugin"] = lora_plugin
    manifest = built(tiny_engine, tmp_path / "engine", **options)
    assert manifest.lora_plugin == lora_plugin
    assert manifest.files["engine.plan"].size_bytes > 0


def test_a_node_says_where_the_ranks_of_its_sites_lie(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    manifest = built(tiny_engine, tmp_path / "engine")
    columns = {
        str(value.name): column
        for node in ir.load(tmp_path / "engine" / ONNX_FILE).graph
        if node.domain == DOMAIN
        for value, column in zip(
            node.inputs[3::2], node.attributes[COLUMNS].as_ints(), strict=False
        )
        if value is not None
    }
    assert columns == {f"lora_A_{site.path}": i for i, site in enumerate(manifest.sites)}


def test_an_ahead_of_time_plugin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--lora-plugin aot takes one adapter at a time"):
        tiny_config(tmp_path, tmp_path / "e", max_loras=8, lora_plugin="aot")


def test_a_negative_number_of_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-loras is -1, expected a whole number 0 or more"):
        tiny_config(tmp_path, tmp_path / "e", max_loras=-1)


@pytest.mark.slow
def test_kernels_of_an_engine_with_slots_are_counted(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    built(tiny_engine, tmp_path / "engine")
    manifest = read_manifest(tmp_path / "engine")
    layouts = kernel_layouts(tmp_path / "engine", manifest, NoProgress())
    counts = {layout.name: layout.count(0) for layout in layouts}
    assert list(counts) == ["without LoRA", "plugin", "native, slots"]
    # q and v share a node in each of two layers; one kernel for the slots of tokens.
    assert counts["plugin"] <= counts["without LoRA"] + 2 + 1
    assert counts["native, slots"] > counts["plugin"]
