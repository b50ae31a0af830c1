"""Engines of a few Llama-3-8B layers: our plugin, native GEMMs, no LoRA; in floats and in codes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_lora.plugins.tensorrt.flavour import flavour_named
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE, PLAN_FILE, read_manifest
from trt_lora.scripts.bench.gpu.random_codes import KINDS, with_random_codes
from trt_lora.scripts.bench.llama import LayerShape

LAYERS, VOCABULARY = 4, 1024
MAX_RANK, MAX_ROWS, MAX_PROMPT, MAX_TOKENS = 64, 32, 64, 1024


def build(folder: Path, flavour: str, shape: LayerShape) -> dict[str, Path]:
    """Build engines of a random model, in floats and in codes.

    Returns:
        Their directories by codes, where there are such, and what does LoRA: "int4 plugin".
    """
    from trt_lora.builder import BuildConfig, build_engine

    model = save_model(folder / "model", shape)
    options: dict[str, Any] = {"flavour": flavour, "dtype": "float16", "max_lora_rank": MAX_RANK}
    options |= {"max_batch_size": MAX_ROWS, "max_input_len": MAX_PROMPT, "max_seq_len": MAX_TOKENS}
    ways: dict[str, dict[str, Any]] = {
        "plugin": {"lora_plugin": "plugin"},
        "one stream": {"lora_plugin": "plugin", "lora_streams": 1},
        "native": {"lora_plugin": "native"},
    }
    directories = {name: folder / name for name in ways}
    for name, way in ways.items():
        build_engine(BuildConfig(model, folder / name, ("all-linear",), **way, **options))
    directories["base"] = _without_lora(directories["native"], folder / "base", flavour)
    for kind in KINDS:
        codes, output = with_random_codes(model, folder / f"{kind} model", kind), folder / kind
        build_engine(BuildConfig(codes, output, ("all-linear",), lora_plugin="plugin", **options))
        directories[f"{kind} plugin"] = output
        directories[f"{kind} base"] = _without_lora(output, folder / f"{kind} base", flavour)
    return directories


def save_model(directory: Path, shape: LayerShape) -> Path:
    """Save a random Llama of a few layers and a small vocabulary."""
    import torch
    import transformers

    heads = shape.hidden // 128 or 1
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_TOKENS,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.half().save_pretrained(directory)
    return directory


def _without_lora(engine: Path, directory: Path, flavour: str) -> Path:
    """The same export without LoRA nodes and inputs, compiled."""
    from trt_lora.builder.passes.remove_lora import engine_without_lora
    from trt_lora.builder.progress import NoProgress
    from trt_lora.builder.tensorrt.compile import Compiler

    directory.mkdir()
    engine_without_lora(engine, directory)
    manifest, plain = read_manifest(engine), read_manifest(directory)
    profiles = {
        name: {key: value for key, value in ranges.items() if key not in manifest.lora_bindings}
        for name, ranges in manifest.profiles.items()
    }
    compiler = Compiler(flavour_named(flavour), NoProgress(), "native")
    compiler.compile(directory / ONNX_FILE, directory / PLAN_FILE, profiles)
    plain = replace(plain, profiles=profiles, flavour=flavour)
    (directory / MANIFEST_FILE).write_text(plain.to_json(), encoding="utf-8")
    return directory
