"""PEFT directories: transposed by key, the scale folded into B, everything else refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file as save_torch_file
from support.fakes.fake_engine import write_peft
from support.refusals import refused
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.formats.peft import adapter_from_peft
from trt_lora.runtime.memory.dtypes import Array

pytestmark = pytest.mark.needs_torch

Q = "model.layers.0.self_attn.q_proj"
A, B = f"lora_A_{Q}", f"lora_B_{Q}"


def factors(rank: int = 2, k: int = 4, n: int = 6) -> dict[str, Array]:
    """As PEFT stores them: A [r, k], B [n, r]; no two elements are equal."""
    values = np.arange(1, rank * (k + n) + 1, dtype=np.float32)
    a, b = values[: rank * k].reshape(rank, k), values[rank * k :].reshape(n, rank)
    return {f"{Q}.lora_A": a, f"{Q}.lora_B": b}


def assert_refused(path: Path, *messages: str) -> None:
    """Refused with the directory and every one of the messages."""
    with refused(AdapterError, path, *messages):
        adapter_from_peft(path).in_memory()


# ------------------------------------------------------------------------------ against PEFT itself


def tiny_llama() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def tiny_gpt2() -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config)


def default(factors: Any) -> Array:
    """PEFT's own weight of the adapter called default."""
    return np.asarray(factors["default"].weight.detach().numpy())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (tiny_llama, {"r": 3, "lora_alpha": 7, "target_modules": "all-linear"}),
        (tiny_llama, {"r": 8, "use_rslora": True, "target_modules": ["q_proj", "o_proj"]}),
        (
            tiny_llama,
            {
                "target_modules": ["q_proj", "v_proj", "down_proj"],
                "rank_pattern": {"layers.1.self_attn.q_proj": 5, "down_proj": 1},
                "alpha_pattern": {"v_proj": 3, "layers.0.mlp.down_proj": 11},
            },
        ),
        (tiny_gpt2, {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
)
def test_the_delta_of_every_module_is_that_of_peft(
    tmp_path: Path, model: Any, fields: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    peft = get_peft_model(model(), LoraConfig(init_lora_weights=False, **fields))
    peft.save_pretrained(str(tmp_path))
    weights = dict(adapter_from_peft(tmp_path).weights)
    for name, layer in peft.named_modules():
        if isinstance(layer, LoraLayer):
            path = name.removeprefix("base_model.model.")
            a, b = (weights.pop(f"lora_{factor}_{path}").values() for factor in "AB")
            np.testing.assert_array_equal(a, default(layer.lora_A).T)
            scale = np.float32(layer.scaling["default"])
            np.testing.assert_array_equal(b, default(layer.lora_B).T * scale)
    assert weights == {}


# --------------------------------------------------------------------------------- canonical form


@pytest.mark.parametrize(("k", "n"), [(4, 6), (2, 6), (4, 2), (2, 2)])
def test_both_factors_are_transposed_by_key_whatever_their_shapes(
    tmp_path: Path, k: int, n: int
) -> None:
    stored = factors(2, k, n)
    adapter = adapter_from_peft(write_peft(tmp_path, stored, r=2, lora_alpha=2))
    np.testing.assert_array_equal(adapter.weights[A].values(), stored[f"{Q}.lora_A"].T)
    np.testing.assert_array_equal(adapter.weights[B].values(), stored[f"{Q}.lora_B"].T)


def test_the_scale_goes_into_b_and_not_into_a(tmp_path: Path) -> None:
    stored = factors()
    adapter = adapter_from_peft(write_peft(tmp_path, stored, r=2, lora_alpha=5))
    np.testing.assert_array_equal(adapter.weights[A].values(), stored[f"{Q}.lora_A"].T)
    np.testing.assert_array_equal(adapter.weights[B].values(), stored[f"{Q}.lora_B"].T * 2.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_scale_is_folded_in_float32_whatever_the_dtype_of_the_file(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    write_peft(tmp_path, {}, r=2, lora_alpha=14)
    stored = {
        f"base_model.model.{Q}.lora_A.weight": torch.full((2, 4), 0.1).to(dtype),
        f"base_model.model.{Q}.lora_B.weight": torch.full((6, 2), 60000.1).to(dtype),
    }
    save_torch_file(stored, tmp_path / "adapter_model.safetensors")
    weights = adapter_from_peft(tmp_path).weights
    a, b = (tensor.float().numpy() for tensor in stored.values())
    assert (weights[A].scale, weights[B].scale) == (1, 7)
    np.testing.assert_array_equal(weights[A].values(), a.T)
    np.testing.assert_array_equal(weights[B].values(), b.T * np.float32(7))  # in float16: infinite


def test_the_adapter_knows_where_it_is_from_and_for_which_base(tmp_path: Path) -> None:
    adapter = adapter_from_peft(
        write_peft(tmp_path, factors(), base_model_name_or_path="some/base")
    )
    assert (adapter.source, adapter.base_model) == (str(tmp_path), "some/base")
    assert adapter.ranks == {Q: 2}
    assert adapter.owned


def test_an_adapter_in_memory_outlives_its_files(tmp_path: Path) -> None:
    stored = factors()
    adapter = adapter_from_peft(write_peft(tmp_path, stored)).in_memory()
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    np.testing.assert_array_equal(adapter.weights[A].values(), stored[f"{Q}.lora_A"].T)


# ---------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    "key",
    [
        "lm_head",
        "model.embed_tokens.lora_embedding_A",
        f"{Q}.lora_magnitude_vector",
        f"{Q}.lora_A.default",
        f"{Q}.lora_C",
        ".lora_A",
        "lora_A",
    ],
)
def test_a_tensor_that_is_no_factor_of_a_linear_is_set_aside_with_a_reason(
    tmp_path: Path, key: str
) -> None:
    extra = {**factors(), key: np.ones((2, 4), np.float32)}
    adapter = adapter_from_peft(write_peft(tmp_path, extra))
    assert adapter.weights.keys() == {A, B}
    assert [*adapter.unusable_keys] == [f"base_model.model.{key}.weight"]
    assert adapter.unusable_keys[f"base_model.model.{key}.weight"].startswith("it ")


def test_a_key_without_pefts_prefix_is_set_aside(tmp_path: Path) -> None:
    write_peft(tmp_path, {})
    save_torch_file(
        {f"{Q}.lora_A.weight": torch.ones(2, 4)}, tmp_path / "adapter_model.safetensors"
    )
    assert adapter_from_peft(tmp_path).unusable_keys.keys() == {f"{Q}.lora_A.weight"}


@pytest.mark.parametrize("factor", ["A", "B"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, factor: str, value: float) -> None:
    stored = factors()
    stored[f"{Q}.lora_{factor}"][1, 1] = value
    assert_refused(write_peft(tmp_path, stored), f"lora_{factor}.weight holds NaN or infinity")


@pytest.mark.parametrize("alpha", [1e38, 1e300])
def test_a_scale_that_leaves_the_range_of_float32_is_refused(tmp_path: Path, alpha: float) -> None:
    assert_refused(write_peft(tmp_path, factors(), r=2, lora_alpha=alpha), "lora_B")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 4}, "rank 2, but the config says rank 4"),
        ({"r": 2, "rank_pattern": {"q_proj": 3}}, "rank 2, but the config says rank 3"),
    ],
)
def test_a_rank_other_than_the_configs_is_refused(
    tmp_path: Path, fields: Mapping[str, object], message: str
) -> None:
    assert_refused(write_peft(tmp_path, factors(), **fields), f"{Q}.lora_A.weight'", message)


def test_the_rank_of_b_is_checked_too(tmp_path: Path) -> None:
    stored = {f"{Q}.lora_A": factors(2)[f"{Q}.lora_A"], f"{Q}.lora_B": factors(3)[f"{Q}.lora_B"]}
    assert_refused(write_peft(tmp_path, stored), f"{Q}.lora_B.weight' has shape [6, 3], rank 3")


@pytest.mark.parametrize("shape", [(2,), (), (2, 4, 1)])
def test_a_factor_that_is_no_matrix_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    stored = {**factors(), f"{Q}.lora_A": np.ones(shape, np.float32)}
    assert_refused(write_peft(tmp_path, stored), f"has shape {list(shape)}, expected a matrix")


def test_missing_weights_are_refused_with_what_is_there_instead(tmp_path: Path) -> None:
    write_peft(tmp_path, {})
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert_refused(tmp_path, "other weight files: adapter_model.bin", "safe_serialization=True")
    (tmp_path / "adapter_model.bin").unlink()
    assert_refused(tmp_path, "other weight files: none")


def test_weights_without_a_config_are_refused(tmp_path: Path) -> None:
    (write_peft(tmp_path, factors()) / "adapter_config.json").unlink()
    assert_refused(tmp_path, "has no adapter_config.json")


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    assert_refused(write_peft(tmp_path, {}), "holds no tensors")


def test_an_adapter_is_what_loading_returns(tmp_path: Path) -> None:
    assert isinstance(adapter_from_peft(write_peft(tmp_path, factors())), Adapter)
