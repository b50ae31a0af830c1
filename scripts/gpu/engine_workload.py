"""W3: engines of a few layers of Llama-3-8B, with our plugin, with native products, and without."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from trt_lora.plugins.flavour import flavour_named
from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.dtypes import storage_dtype
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE, PLAN_FILE, Manifest, read_manifest
from trt_lora.runtime.step_inputs import empty_cache
from trt_lora.runtime.tensors import tensor_from_storage
from trt_lora.scripts.gpu.results import Expectation, Expectations, Row
from trt_lora.scripts.gpu.run import Skipped
from trt_lora.scripts.gpu.shapes import LLAMA_3_8B, ModelShape
from trt_lora.scripts.gpu.tensorrt import Answer
from trt_lora.scripts.gpu.timing import ROUNDS, Times, alternate

LAYERS, VOCABULARY, MAX_RANK, MAX_ROWS = 4, 1024, 64, 32
SIZES = ((1, 16), (8, 16), (32, 16), (1, 64))
INSTEAD = (
    "the replay of TensorRT-RTX's kernel lists in W2 (ours, native_dynamic) stands for it: "
    "a replay, not TensorRT"
)


def expectations() -> Expectations:
    """Return the targets of the whole step; four layers without the head are close to it."""
    return {
        f"m{m} r{rank}": {
            "plugin overhead, %": Expectation(4.7, 9.8, at_most=8.0 if rank == 16 else None),
            "native overhead, %": Expectation(36.0, 61.0, at_least=25.0 if rank == 16 else None),
        }
        for m, rank in SIZES
    }


def rows(
    answers: Sequence[Answer], shape: ModelShape = LLAMA_3_8B, rounds: int = ROUNDS
) -> Iterator[Row]:
    """Build three engines and run them in turns, where one of the flavours runs."""
    flavour = next((answer.flavour for answer in answers if answer.runs), None)
    if flavour is None:
        reasons = "; ".join(f"{a.flavour} came to {a.reached!r}: {a.reason}" for a in answers)
        raise Skipped(f"no TensorRT runs here ({reasons}). {INSTEAD}")
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        engines = {
            name: stack.enter_context(open_engine(directory, "tensorrt"))
            for name, directory in build(folder, flavour, shape).items()
        }
        for m, rank in SIZES:
            maps = {name: inputs(engine, m, rank) for name, engine in engines.items()}
            times = _time(engines, maps, rounds)
            yield _row(m, rank, flavour, times)


def build(folder: Path, flavour: str, shape: ModelShape) -> dict[str, Path]:
    """Build engines of a random model; return their directories by what does LoRA in them."""
    from trt_lora.builder import BuildConfig, build_engine

    model = save_model(folder / "model", shape)
    directories = {}
    for name in ("plugin", "native"):
        options: dict[str, Any] = {"lora_plugin": name, "flavour": flavour}
        sizes = {"max_lora_rank": MAX_RANK, "max_batch_size": MAX_ROWS}
        options |= sizes | {"max_input_len": 8, "max_seq_len": 16, "dtype": "float16"}
        build_engine(BuildConfig(model, folder / name, ("all-linear",), **options))
        directories[name] = folder / name
    directories["base"] = _without_lora(directories["native"], folder / "base", flavour)
    return directories


def save_model(directory: Path, shape: ModelShape) -> Path:
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
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model.half().save_pretrained(directory)
    return directory


def inputs(engine: Engine, m: int, rank: int) -> TensorMap:
    """Return the inputs of one decode step of m sequences with an empty cache."""
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    manifest = engine.manifest
    if manifest.sites:
        manager.add_weights("a", _weights(manifest, rank))
        manager.switch_weights("a")
    arrays = {
        "input_ids": np.arange(m)[:, None] + 3,
        "attention_mask": np.ones((m, 1), np.int64),
        "position_ids": np.zeros((m, 1), np.int64),
        "logits_to_keep": np.zeros(1, np.int64),
    }
    tensors = {name: tensor_from_storage(array, "int64") for name, array in arrays.items()}
    tensor_map = TensorMap(tensors | empty_cache(manifest, m))
    manager.refresh_tensor_map(tensor_map)
    return tensor_map


def _weights(manifest: Manifest, rank: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    weights: dict[str, object] = {}
    for name, (site, factor) in manifest.lora_bindings.items():
        values = rng.standard_normal(site.shape(factor, rank)) * 0.02
        weights[name] = values.astype(storage_dtype(site.dtype))
    return weights


def _without_lora(engine: Path, directory: Path, flavour: str) -> Path:
    """The same export without LoRA nodes and inputs, compiled."""
    from trt_lora.builder.compile import Compiler
    from trt_lora.builder.progress import Silent
    from trt_lora.scripts.plain_engine import engine_without_lora

    directory.mkdir()
    engine_without_lora(engine, directory)
    manifest, plain = read_manifest(engine), read_manifest(directory)
    profiles = {
        name: {key: value for key, value in ranges.items() if key not in manifest.lora_bindings}
        for name, ranges in manifest.profiles.items()
    }
    compiler = Compiler(flavour_named(flavour), Silent(), "native")
    compiler.compile(directory / ONNX_FILE, directory / PLAN_FILE, profiles)
    plain = replace(plain, profiles=profiles, flavour=flavour)
    (directory / MANIFEST_FILE).write_text(plain.to_json(), encoding="utf-8")
    return directory


def _time(engines: dict[str, Engine], maps: dict[str, TensorMap], rounds: int) -> Times:
    """Wall time of a run, the engine's own graph included from the third run on."""

    def us(name: str) -> float:
        start = time.perf_counter()
        engines[name].execute(maps[name])
        return (time.perf_counter() - start) * 1e6

    def sample(order: Sequence[str]) -> list[float]:
        return [statistics.median(us(name) for _ in range(5)) for name in order]

    names = list(engines)
    for _ in range(3):  # specialised kernels, then the capture
        sample(names)
    return alternate(names, sample, rounds)


def _row(m: int, rank: int, flavour: str, times: Times) -> Row:
    return Row(
        f"m{m} r{rank}",
        {"m": m, "rank": rank, "layers": LAYERS, "flavour": flavour},
        {f"{name}, us": times.median(name) for name in times.samples},
        {
            "plugin overhead, %": times.overhead_percent("plugin", "base"),
            "native overhead, %": times.overhead_percent("native", "base"),
            "native / plugin": times.ratio("native", "plugin"),
        },
    )
