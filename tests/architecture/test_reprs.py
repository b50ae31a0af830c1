"""The repr of every public object is one line below 200 characters, however large its model is."""

import enum
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights
from support.fakes.slot_engine import slot_manifest

import trt_lora.builder as builder
import trt_lora.runtime as runtime
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.short_repr import clipped, short_value
from trt_lora.runtime.adapters.fitting.fit import preview_adapter
from trt_lora.runtime.adapters.formats.diffusion.spellings import COMPONENTS
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.engines.onnxruntime.engine import OnnxRuntimeEngine
from trt_lora.runtime.engines.tensorrt.engine import TensorRTEngine
from trt_lora.runtime.interfaces import max, trtllm, vllm
from trt_lora.runtime.memory.tensor import tensor_from_numpy

PACKAGES = (runtime, builder, max, trtllm, vllm)
LONG = "a/very/long/name " * 300
PATHS = [f"model.layers.{i}.self_attn.{n}_proj" for i in range(126) for n in "qkvo"]
MANIFEST = replace(
    make_manifest(),
    sites=tuple(Site(path, 8, 6, "float32") for path in PATHS),
    base_model=replace(make_manifest().base_model, name=LONG),
    flavour="none" * 99,
)
TENSORS = {n: tensor_from_numpy(w) for n, w in make_weights(MANIFEST).items()}
ADAPTER = runtime.Adapter(LONG, {name: weight_of(name, tensor) for name, tensor in TENSORS.items()})
LAYER = vllm.LoRALayerWeights(np.zeros((999, 4), np.float32), np.zeros((4, 999), np.float32))


def loaded_manager() -> runtime.LoRAManager:
    """A manager of 50 adapters; the active one has a long name."""
    manager = runtime.LoRAManager()
    for name in (*"abcdefgh", LONG[:999]):
        manager.add_weights(name, TENSORS)
    manager.switch_weights(LONG[:999])
    return manager


def long_build() -> builder.BuildConfig:
    """Every option with a long value."""
    names = tuple(PATHS)
    return builder.BuildConfig(
        Path(LONG), Path(LONG), names, tuple(map(Path, names)), 16, "slots", 9, 16, 99, 999,
        "float32", "none", timing_cache=Path(LONG),
    )  # fmt: skip


def long_graph() -> builder.GraphConfig:
    """Every option with a long value."""
    names, path = tuple(PATHS), Path(LONG)
    return builder.GraphConfig(path, path, names, (path,) * 99, 16, names, LONG, path)


def pipeline_graph() -> builder.GraphConfig:
    """Every option that a pipeline takes, with a long value."""
    return builder.GraphConfig(Path(LONG), Path(LONG), tuple(PATHS), (), 16, tuple(PATHS))


SAMPLES: dict[str, Callable[[], object]] = {
    "Adapter": lambda: ADAPTER,
    "ServingConfig": lambda: runtime.ServingConfig(9, None, 10**9, False, 10**9, 1e9, 10**9),
    "Engine": lambda: runtime.Engine(OnnxRuntimeEngine(Path(LONG), MANIFEST)),
    "Chat": lambda: runtime.Chat([{"role": LONG, "content": LONG}] * 9, False, True, {LONG: LONG}),
    "BuildConfig": long_build,
    "GraphConfig": long_graph,
    "PipelineConfig": lambda: builder.PipelineConfig(pipeline_graph(), tuple(PATHS)),
    "PipelineAdapters": lambda: runtime.PipelineAdapters(
        dict.fromkeys(COMPONENTS, runtime.AdapterStore(FakeExecutor()))
    ),
    "PipelineEngines": lambda: runtime.PipelineEngines(
        Path(LONG),
        LONG,
        dict.fromkeys(COMPONENTS, runtime.Engine(OnnxRuntimeEngine(Path(LONG), MANIFEST))),
    ),
    "StoreConfig": lambda: runtime.StoreConfig(2**60, 2**60),
    "Completion": lambda: runtime.Completion(tuple(range(4096)), LONG, "length"),
    "Coverage": lambda: preview_adapter(ADAPTER, MANIFEST),
    "LoRAManager": loaded_manager,
    "Manifest": lambda: MANIFEST,
    "SamplingParams": lambda: runtime.SamplingParams(
        max_tokens=99,
        temperature=0.7,
        top_k=9,
        top_p=0.9,
        seed=9,
        stop_token_ids=range(4096),
        ignore_eos=True,
        n=9,
        stop=LONG,
    ),
    "AdapterStore": lambda: runtime.AdapterStore(FakeExecutor(slot_manifest(2))),
    "StepAnswers": lambda: runtime.StepAnswers(
        {n: runtime.Token(n, n) for n in range(256)}, {n: KeyError(LONG) for n in range(256)}
    ),
    "StructuredOutputsParams": lambda: runtime.StructuredOutputsParams(regex=LONG),
    "Tensor": lambda: tensor_from_numpy(np.zeros((1, 2, 3, 4, 5), np.int64)),
    "TensorMap": lambda: runtime.TensorMap(TENSORS),
    "Token": lambda: runtime.Token(10**9, 10**9, "length"),
    "max.LoRAConfig": lambda: max.LoRAConfig(lora_paths=tuple(PATHS)),
    "max.LoRAOutcome": lambda: max.LoRAOutcome(max.LoRAStatus.LOAD_ERROR, LONG),
    "trtllm.LoraCacheOptions": trtllm.LoraCacheOptions,
    "trtllm.TrtllmLoraRequest": lambda: trtllm.TrtllmLoraRequest(
        1, np.zeros((999, 999)), np.zeros((999, 3), np.int32)
    ),
    "vllm.CompletionOutput": lambda: vllm.CompletionOutput(0, LONG, [9] * 999, 0.5, None, "stop"),
    "vllm.LoRAConfig": lambda: vllm.LoRAConfig(9, 9, "float32", 0, 99),
    "vllm.LoRALayerWeights": lambda: LAYER,
    "vllm.LoRAMapping": lambda: vllm.LoRAMapping.map_sequence_to_adapters(range(256)),
    "vllm.LoRAModel": lambda: vllm.LoRAModel(1, ADAPTER, LONG, Path(LONG)),
    "vllm.LoRARequest": lambda: vllm.LoRARequest(LONG, 1, LONG, base_model_name=LONG),
    "vllm.PEFTHelper": lambda: vllm.PEFTHelper(8, 16, list(PATHS)),
    "vllm.RequestOutput": lambda: vllm.RequestOutput("1", LONG, [9] * 999, []),
    "vllm.SamplingParams": lambda: vllm.SamplingParams(stop=LONG),
    "vllm.TokenLogprob": lambda: vllm.TokenLogprob(-0.5, 1, LONG),
    "TensorRTEngine": lambda: TensorRTEngine(Path(LONG), replace(MANIFEST, flavour="tensorrt-rtx")),
    "OnnxRuntimeEngine": lambda: OnnxRuntimeEngine(Path(LONG), MANIFEST),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_repr_is_one_short_line_that_names_the_class(name: str) -> None:
    sample = SAMPLES[name]()
    found = repr(sample)
    assert len(found) < 200
    assert "\n" not in found
    assert found.lstrip("<").startswith(type(sample).__name__)


def test_every_public_class_with_a_repr_of_its_own_has_a_sample() -> None:
    classes: dict[str, type] = {}
    for package in PACKAGES:
        prefix = "" if package in (runtime, builder) else package.__name__.rpartition(".")[2] + "."
        found = {name: getattr(package, name) for name in package.__all__}
        classes |= {prefix + n: c for n, c in found.items() if isinstance(c, type)}
    own = {
        name
        for name, cls in classes.items()
        if id(cls.__repr__) != id(object.__repr__) and not issubclass(cls, enum.Enum | Exception)
    }
    assert own
    assert own <= set(SAMPLES)


def test_a_repr_tells_what_is_not_the_default_and_how_much_there_is() -> None:
    config = builder.BuildConfig(Path("m"), Path("e"), ("q_proj",), dtype="float32", max_loras=4)
    assert repr(config) == (
        "BuildConfig(model=PosixPath('m'), output=PosixPath('e'), target_modules=('q_proj',), "
        "max_loras=4, dtype='float32')"
    )
    manifest = replace(make_manifest(), max_loras=2)
    assert repr(manifest) == (
        "<Manifest of 'tiny': 4 sites, rank 1 to 16, 2 slots, 'float32', 'none'>"
    )
    assert repr(runtime.TensorMap(TENSORS)) == "<TensorMap of 1008 tensors>"
    assert repr(preview_adapter(ADAPTER, MANIFEST)).endswith(
        "504 of 504 sites adapted, 0 tensors not bound, 0 ignored, 0 warnings>"
    )
    assert "lora_a=<float32 [999, 4]>" in repr(LAYER)
    assert repr(loaded_manager()).startswith("<LoRAManager of 9 adapters, active: 'a/very/long")


def test_what_is_too_long_is_clipped_to_one_line() -> None:
    assert clipped("a\n b") == "a b"
    assert clipped("x" * 300) == "x" * 196 + "..."
    assert short_value([1, 2, 3]) == "[1, 2, 3]"
    assert short_value({1, 2, 3, 4}) == "<4 items>"
