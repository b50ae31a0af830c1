"""vLLM's data classes: what they check, and that their numbers are those of the adapter."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters.many_adapters import slot_adapters
from support.adapters.trtllm_files import manifest_of, site
from support.fakes.fake_engine import write_peft

from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.interfaces.vllm import (
    LoRAConfig,
    LoRALayerWeights,
    LoRAMapping,
    LoRAModel,
    LoRARequest,
    PEFTHelper,
)
from trt_lora.runtime.memory.dtypes import Array

Q, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qv")
K, N = 8, 6


def layer(rank: int = 2, seed: int = 0, scaling: float = 1.0, n: int = N) -> LoRALayerWeights:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((K, rank), np.float32), rng.standard_normal((rank, n), np.float32)
    return LoRALayerWeights(a, b, scaling)


def product(of: LoRALayerWeights) -> Array:
    """Scaling * A @ B in float64."""
    found: Array = of.scaling * (of.lora_a.astype(np.float64) @ of.lora_b.astype(np.float64))
    return found


def peft_directory(folder: Path, **fields: object) -> Path:
    """Q and v of layer 0: rank 2, alpha 4."""
    rng, tensors = np.random.default_rng(1), {}
    for path in (Q, V):
        tensors[f"{path}.lora_A"] = rng.standard_normal((2, K), np.float32)
        tensors[f"{path}.lora_B"] = rng.standard_normal((N, 2), np.float32)
    options: dict[str, Any] = {"lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    return write_peft(folder / "peft", tensors, **options | fields)


# ------------------------------------------------------------------------------- LoRALayerWeights


def test_the_delta_of_a_layer_is_the_scaled_product_before_and_after_optimize() -> None:
    weights = layer(scaling=2.5)
    folded = weights.optimize()
    assert (weights.rank, folded.scaling) == (2, 1.0)
    np.testing.assert_allclose(weights.compute_delta_weight(), product(weights), rtol=1e-5)
    np.testing.assert_allclose(folded.compute_delta_weight(), product(weights), rtol=1e-5)
    assert folded.optimize() is folded


def test_a_layer_of_other_shapes_is_refused() -> None:
    with pytest.raises(AdapterError, match=r"\[8, 2\] and lora_b \[3, 6\], expected \[in, rank\]"):
        LoRALayerWeights(np.zeros((8, 2)), np.zeros((3, 6)))


def test_the_parts_of_a_fused_layer_become_one_site_of_the_engine() -> None:
    q, v = layer(2, 0, 3.0, n=6), layer(3, 1, n=2)
    path = "model.layers.0.self_attn.qkv_proj"
    adapter = LoRAModel.of_layers(1, {Q: q, V: v}).adapter
    fitted = fit_adapter(adapter, manifest_of(site(path, K, 10, (6, 2, 2))))
    a, b = (fitted.tensors[f"lora_{f}_{path}"].numpy().astype(np.float64) for f in "AB")
    expected = np.zeros((K, 10))
    expected[:, :6], expected[:, 8:] = product(q), product(v)
    np.testing.assert_allclose(a @ b, expected, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------- LoRAModel


def test_a_model_of_a_peft_directory_has_its_layers_scale_and_rank(tmp_path: Path) -> None:
    model = LoRAModel.from_local_checkpoint(peft_directory(tmp_path), lora_model_id=3)
    assert (model.id, model.rank, model.scaling, model.extra_vocab_size) == (3, 2, 2.0, 0)
    assert model.loras.keys() == {Q, V}
    assert model.check_lora_name(Q)
    assert not model.check_lora_name("model.layers.1.self_attn.q_proj")
    assert model.get_lora("elsewhere") is None
    weights = model.loras[Q]
    assert model.get_lora(Q) is weights
    stored = np.random.default_rng(1)
    a, b = stored.standard_normal((2, K), np.float32), stored.standard_normal((N, 2), np.float32)
    np.testing.assert_array_equal(weights.lora_a, a.T)
    np.testing.assert_array_equal(weights.lora_b, b.T)
    np.testing.assert_allclose(weights.compute_delta_weight(), 2.0 * (b @ a).T, rtol=1e-5)


def test_a_clone_has_another_number_and_an_optimized_model_the_same_deltas(tmp_path: Path) -> None:
    model = LoRAModel.from_local_checkpoint(peft_directory(tmp_path), lora_model_id=3, name="x")
    clone, folded = model.clone(4), model.optimize()
    assert [m.adapter_name for m in (model, clone)] == ["x", "lora 4"]
    assert clone.adapter is model.adapter
    assert folded.scaling == 1.0
    for path in (Q, V):
        expected = product(model.loras[path])
        np.testing.assert_allclose(product(folded.loras[path]), expected, rtol=1e-5)


def test_a_checkpoint_that_is_missing_or_adapts_other_modules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        LoRAModel.from_local_checkpoint(tmp_path / "none", lora_model_id=1)
    directory = peft_directory(tmp_path)
    LoRAModel.from_local_checkpoint(directory, ["q_proj", "v_proj", "o_proj"], lora_model_id=1)
    with pytest.raises(ValueError, match=r"expected target modules in q_proj but received q_proj"):
        LoRAModel.from_local_checkpoint(directory, ["q_proj"], lora_model_id=1)
    with pytest.raises(ValueError, match="id must be > 0, got 0"):
        LoRAModel.from_local_checkpoint(directory, lora_model_id=0)


def test_layers_of_different_scales_have_no_common_one() -> None:
    model = LoRAModel.of_layers(1, {Q: layer(scaling=2), V: layer(scaling=3)})
    with pytest.raises(AdapterError, match="2 scales; ask its layers"):
        _ = model.scaling
    assert model.loras[Q].scaling == 2


# ------------------------------------------------------------------------- LoRARequest, LoRAConfig


def test_a_request_knows_its_fields_by_both_names() -> None:
    request = LoRARequest("a", 1, "/a", base_model_name="tiny")
    assert (request.name, request.adapter_id, request.path) == ("a", 1, "/a")
    assert len({request, LoRARequest("a", 1, "/a", base_model_name="tiny")}) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_int_id": 0}, "id must be > 0, got 0"),
        ({"lora_int_id": True}, r"lora_int_id is True \(bool\), expected int"),
        ({"lora_path": ""}, "lora_path cannot be empty"),
        ({"lora_local_path": "/a"}, "lora_local_path is '/a': .*pass lora_path"),
        ({"long_lora_max_len": 8}, "long_lora_max_len is 8: "),
        ({"tensorizer_config_dict": {}}, "tensorizer_config_dict is {}: "),
    ],
)
def test_a_request_with_a_wrong_or_unsupported_field_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "/a", **fields})


def test_a_config_takes_what_it_leaves_open_from_the_engine() -> None:
    found = LoRAConfig().resolved(slot_adapters())
    assert (found.max_loras, found.max_lora_rank, found.max_cpu_loras) == (2, 16, 4)
    assert found.lora_dtype == found.effective_dtype == "float32"
    assert LoRAConfig(lora_dtype="auto").effective_dtype is None
    names = [LoRAConfig(lora_dtype=name).effective_dtype for name in ("fp16", "bf16", "float16")]
    assert names == ["float16", "bfloat16", "float16"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_loras": 0}, "max_loras must be positive, got 0"),
        ({"max_lora_rank": 0}, r"max_lora_rank must be in range \(0, 512\], got 0"),
        ({"max_lora_rank": 513}, "max_lora_rank must be in range"),
        ({"lora_extra_vocab_size": 256}, "lora_extra_vocab_size is 256: "),
        ({"fully_sharded_loras": True}, "fully_sharded_loras is True: "),
        ({"bias_enabled": True}, "bias_enabled is True: "),
        ({"long_lora_scaling_factors": (2.0,)}, "long_lora_scaling_factors is "),
    ],
)
def test_a_config_out_of_range_or_with_an_unsupported_option_is_a_value_error(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_loras": 1}, "max_loras is 1, these adapters have 2 slots"),
        ({"max_lora_rank": 8}, "max_lora_rank is 8, this engine takes adapters up to rank 16"),
        ({"lora_dtype": "fp16"}, "lora_dtype is 'fp16', this engine is float32"),
        ({"lora_dtype": "int8"}, "lora_dtype is 'int8'"),
        ({"max_cpu_loras": 1}, r"max_cpu_loras \(1\) must be >= max_loras \(2\)"),
    ],
)
def test_a_config_that_contradicts_the_engine_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LoRAConfig(**fields).resolved(slot_adapters())


# -------------------------------------------------------------------------------------- PEFTHelper


def test_the_helper_reads_what_the_config_says(tmp_path: Path) -> None:
    helper = PEFTHelper.from_local_dir(peft_directory(tmp_path))
    assert (helper.r, helper.lora_alpha, helper.bias) == (2, 4, "none")
    assert helper.target_modules == ["q_proj", "v_proj"]
    assert helper.scaling_factor == helper.vllm_lora_scaling_factor == 2.0
    helper.validate_legal(LoRAConfig(max_lora_rank=2))
    rslora = PEFTHelper.from_local_dir(peft_directory(tmp_path, use_rslora=True, r=4))
    assert rslora.scaling_factor == 2.0


def test_the_helper_refuses_a_missing_or_damaged_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"adapter_config.json not found in"):
        PEFTHelper.from_local_dir(tmp_path)
    for fields, message in (
        ({"target_modules": None}, "required PEFT config field missing: target_modules"),
        ({"r": "2"}, "r is '2', expected int"),
        ({"r": True}, "r is True, expected int"),
        ({"use_dora": 1}, "use_dora is 1, expected bool"),
    ):
        with pytest.raises(ValueError, match=message):
            PEFTHelper.from_local_dir(peft_directory(tmp_path, **fields))


def test_the_helper_names_every_field_that_is_not_legal() -> None:
    helper = PEFTHelper(8, 0, ["q_proj"], "all", ["lm_head"], use_dora=True)
    with pytest.raises(ValueError, match=r"^LoRA config validation failed:\n") as caught:
        helper.validate_legal(LoRAConfig(max_lora_rank=4))
    text = str(caught.value)
    for reason in (
        *("modules_to_save", "use_dora", "bias is 'all'", "lora_alpha must be positive, got 0"),
        "r=8 exceeds max_lora_rank=4",
    ):
        assert reason in text
    with pytest.raises(ValueError, match="r=0 must be positive"):
        PEFTHelper(0, 1, "q").validate_legal(LoRAConfig())


# ------------------------------------------------------------------------------------- LoRAMapping


def test_a_mapping_of_ids_gives_every_adapter_an_index_and_the_base_zero() -> None:
    mapping = LoRAMapping.map_sequence_to_adapters([7, None, 3, 7, 0], is_prefill=True)
    assert mapping.index_mapping == (1, 0, 2, 1, 0)
    assert mapping.lora_index_mapping == {7: 1, 3: 2}
    assert mapping.lora_ids == (7, None, 3, 7, None)
    assert mapping.prompt_mapping == (0, 1, 2, 3, 4)
    assert mapping.max_lora_id == 7
    assert mapping.lora_set == {7: {0, 3}, 3: {2}}
    assert mapping.is_prefill
    assert [mapping.get_lora_id_for_index(i) for i in (0, 1, 2, 5, -1)] == [7, None, 3, None, None]
    assert mapping.create_batch_indices(3).tolist() == [1, 0, 2]
    assert mapping.create_batch_indices(7).tolist() == [1, 0, 2, 1, 0, 0, 0]
    assert mapping.create_batch_indices(3).dtype == np.int32
    assert LoRAMapping.map_sequence_to_adapters([]).max_lora_id == 0


@pytest.mark.parametrize(
    ("rows", "indices", "message"),
    [
        ((2,), {7: 1}, "Invalid index mapping: 2"),
        ((-1,), {7: 1}, "Invalid index mapping: -1"),
        ((1,), {-7: 1}, "Invalid LoRA ID: -7"),
        ((1,), {7: 1, 3: 1}, "each adapter has its own"),
        ((0,), {7: 0}, "0 is the base"),
    ],
)
def test_a_mapping_that_leads_nowhere_is_a_value_error(
    rows: tuple[int, ...], indices: dict[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LoRAMapping(rows, indices)
