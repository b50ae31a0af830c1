"""Inputs of an engine as arrays: what an engine takes, and what a decoder would give it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import TinyEngine
from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime import LoRAManager, TensorMap, open_engine, read_manifest
from trt_lora.runtime.engines.tensorrt.inputs import allows
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.tensor import tensor_from_storage
from trt_lora.scripts.verification.example_inputs import Inputs, InputSpec, lora_inputs, make_inputs


@pytest.fixture(scope="module")
def manifest(tiny_engine: TinyEngine) -> Manifest:
    """Of the tiny engine."""
    return read_manifest(tiny_engine.engine)


def run(engine: Path, step: Inputs) -> dict[str, np.ndarray]:
    """Run an engine on one step and return its outputs."""
    with open_engine(engine, "onnxruntime") as executor:
        tensors = {name: tensor_from_storage(a, a.dtype.name) for name, a in step.items()}
        outputs = executor.execute(TensorMap(tensors))
        return {name: tensor.numpy().copy() for name, tensor in outputs.items()}


def test_steps_alternate_and_lie_in_their_profiles(
    tiny_engine: TinyEngine, manifest: Manifest
) -> None:
    steps = make_inputs(tiny_engine.engine, manifest, InputSpec(tiny_engine.adapter, iterations=4))
    assert [step["input_ids"].shape for step in steps] == [(2, 16), (2, 1), (2, 16), (2, 1)]
    assert [step["bound"].shape[0] for step in steps] == [16, 64, 16, 64]
    assert [step["lengths"].tolist() for step in steps[:2]] == [[0, 0], [16, 11]]
    for number, step in enumerate(steps):
        assert list(step) == [binding.name for binding in manifest.inputs]
        ranges = manifest.profiles["decode" if number % 2 else "prefill"]
        assert all(allows(allowed, step[name].shape) for name, allowed in ranges.items())
        assert step["input_ids"].max() < 97
    assert not np.array_equal(steps[0]["input_ids"], steps[2]["input_ids"])


def test_a_seed_is_the_same_inputs(tiny_engine: TinyEngine, manifest: Manifest) -> None:
    one, same, other = (
        make_inputs(tiny_engine.engine, manifest, InputSpec(seed=seed)) for seed in (3, 3, 4)
    )
    for left, right in zip(one, same, strict=True):
        assert all(np.array_equal(left[name], right[name]) for name in left)
    assert not np.array_equal(one[0]["input_ids"], other[0]["input_ids"])
    assert not np.array_equal(one[1]["cache.0.key"], other[1]["cache.0.key"])


def test_masked_positions_do_not_count_and_do_not_matter(
    tiny_engine: TinyEngine, manifest: Manifest
) -> None:
    step = make_inputs(tiny_engine.engine, manifest, InputSpec())[1]
    assert step["lengths"].tolist() == [16, 11]
    assert step["bound"].shape == (64,)  # what the decode profile takes
    before = run(tiny_engine.engine, step)["logits"]
    step["cache.0.value"] = step["cache.0.value"].copy()
    step["cache.0.value"][1, :, 12:] = 9.0
    assert np.array_equal(before, run(tiny_engine.engine, step)["logits"])


def test_an_engine_computes_of_a_prefill_step_what_a_decoder_does(
    tiny_engine: TinyEngine, manifest: Manifest
) -> None:
    step = make_inputs(tiny_engine.engine, manifest, InputSpec(tiny_engine.adapter))[0]
    with open_engine(tiny_engine.engine, "onnxruntime") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        manager.load_weights("a", tiny_engine.adapter)
        manager.switch_weights("a")
        tensor_map = TensorMap()
        manager.refresh_tensor_map(tensor_map)
        for name, tensor in tensor_map.items():
            assert np.array_equal(step[name], tensor.numpy())
        ids = step["input_ids"]
        expected = StaticDecoder(engine, tensor_map, len(ids)).run(ids)
    assert np.array_equal(run(tiny_engine.engine, step)["logits"], expected)


def test_without_an_adapter_every_lora_input_is_a_rank_1_zero(manifest: Manifest) -> None:
    inputs = lora_inputs(manifest, None)
    assert set(inputs) == set(manifest.lora_bindings)
    for name, (site, factor) in manifest.lora_bindings.items():
        assert inputs[name].shape == site.shape(factor, 1)
        assert not inputs[name].any()


def test_the_shape_of_random_tokens_can_be_chosen(
    tiny_engine: TinyEngine, manifest: Manifest
) -> None:
    prefill, decode = make_inputs(tiny_engine.engine, manifest, InputSpec(shape=(1, 5)))
    assert prefill["input_ids"].shape == (1, 5)
    assert decode["lengths"].tolist() == [5]


@pytest.mark.parametrize("shape", [(3, 4), (1, 33), (2, 0)])
def test_shapes_outside_the_profile_are_refused(
    tiny_engine: TinyEngine, manifest: Manifest, shape: tuple[int, int]
) -> None:
    with pytest.raises(ConfigError, match=r"input_ids would be .* this engine takes \[1, 1\]"):
        make_inputs(tiny_engine.engine, manifest, InputSpec(shape=shape))


def test_a_full_engine_still_decodes(tiny_engine: TinyEngine, manifest: Manifest) -> None:
    short = replace(manifest, max_input_len=8, max_seq_len=8, profiles={})
    for shape in (None, (2, 8)):
        _, decode = make_inputs(tiny_engine.engine, short, InputSpec(shape=shape))
        assert decode["lengths"].tolist() == [7, 5]


def test_a_prompt_needs_a_tokenizer(tiny_engine: TinyEngine, manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        make_inputs(tiny_engine.engine, manifest, InputSpec(prompt="Name a fruit."))


def test_an_adapter_of_another_base_is_refused(
    tiny_engine: TinyEngine, manifest: Manifest, tmp_path: Path
) -> None:
    other = save_model("Llama", tmp_path / "model", hidden_size=64)
    adapter = save_adapter(other, tmp_path / "adapter", r=4, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match="another base model"):
        make_inputs(tiny_engine.engine, manifest, InputSpec(adapter))


def test_an_adapter_with_tensors_that_no_site_takes_is_refused(
    tiny_engine: TinyEngine, manifest: Manifest, tmp_path: Path
) -> None:
    adapter = save_adapter(tiny_engine.model, tmp_path / "all", r=4)
    with pytest.raises(AdapterError, match="20 of its tensors have no binding"):
        make_inputs(tiny_engine.engine, manifest, InputSpec(adapter))


def test_an_engine_without_lora_is_refused(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    plain = engine_without_lora(tiny_engine.engine, tmp_path)
    with pytest.raises(ConfigError, match="has no LoRA inputs; build one with"):
        make_inputs(plain, read_manifest(plain), InputSpec())


def test_bfloat16_is_torchs(tiny_engine: TinyEngine, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    targets = ("attn_q", "attn_v")
    config = tiny_config(
        tiny_engine.model, tmp_path / "engine", dtype="bfloat16", target_modules=targets
    )
    built = quick_build(config)
    step = make_inputs(tmp_path / "engine", built, InputSpec(tiny_engine.adapter))[1]
    name = next(iter(built.lora_bindings))
    assert step[name].dtype == step["cache.0.key"].dtype == torch.bfloat16
    stored = lora_inputs(built, tiny_engine.adapter)[name]
    assert np.array_equal(step[name].float().numpy(), stored.astype(np.float32))
