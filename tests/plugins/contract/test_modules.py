"""The module table against TensorRT-LLM's names and ids, and paths of transformers' models."""

import pytest

from trt_lora.plugins.contract.modules import (
    ALL_LINEAR,
    MODULES,
    known_targets,
    module_of,
    resolve_targets,
)
from trt_lora.plugins.errors import ConfigError

# LoraModuleType of TensorRT-LLM, in the order of its values.
TENSORRT_LLM = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h",
    "mlp_gate", "cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v",
    "cross_attn_dense", "moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router", "mlp_router",
    "mlp_gate_up", "shared_expert_h_to_4h", "shared_expert_4h_to_h", "shared_expert_gate",
    "mamba_in_proj", "mamba_out_proj", "moe_latent_fc1", "moe_latent_fc2",
)  # fmt: skip


def name_of(path: str) -> str | None:
    module = module_of(path)
    return module.name if module else None


def test_the_table_has_the_names_of_tensorrt_llm_at_its_ids() -> None:
    by_id = {module.id: module.name for module in MODULES if module.id is not None}
    assert by_id == dict(enumerate(TENSORRT_LLM))
    without = {module.name for module in MODULES if module.id is None}
    assert without == {"moe_gate_up", "lm_head", "embed_tokens"}


def test_no_suffix_means_two_modules() -> None:
    suffixes = [suffix for module in MODULES for suffix in module.suffixes]
    assert len(suffixes) == len(set(suffixes))


def test_tensor_parallelism_splits_k_of_the_linears_that_end_a_block() -> None:
    rows = {module.name for module in MODULES if module.parallel == "row"}
    assert rows == {
        "attn_dense",
        "mlp_4h_to_h",
        "cross_attn_dense",
        "moe_4h_to_h",
        "shared_expert_4h_to_h",
        "mamba_out_proj",
    }


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.layers.0.self_attn.q_proj", "attn_q"),
        ("model.layers.0.self_attn.o_proj", "attn_dense"),
        ("model.layers.0.mlp.gate_proj", "mlp_h_to_4h"),
        ("model.layers.0.mlp.up_proj", "mlp_gate"),
        ("model.layers.0.mlp.down_proj", "mlp_4h_to_h"),
        ("model.layers.0.mlp.gate_up_proj", "mlp_gate_up"),
        ("model.layers.0.self_attn.qkv_proj", "attn_qkv"),
        ("transformer.h.0.attn.c_attn", "attn_qkv"),
        ("transformer.h.0.attn.c_proj", "attn_dense"),
        ("transformer.h.0.mlp.c_proj", "mlp_4h_to_h"),
        ("transformer.h.0.mlp.c_fc", "mlp_h_to_4h"),
        ("gpt_neox.layers.0.attention.dense", "attn_dense"),
        ("gpt_neox.layers.0.mlp.dense_h_to_4h", "mlp_h_to_4h"),
        ("transformer.h.0.self_attention.dense", "attn_dense"),
        ("model.decoder.layers.0.encoder_attn.q_proj", "cross_attn_q"),
        ("encoder.block.0.layer.0.SelfAttention.o", "attn_dense"),
        ("decoder.block.0.layer.1.EncDecAttention.k", "cross_attn_k"),
        ("decoder.block.0.layer.2.DenseReluDense.wi_0", "mlp_h_to_4h"),
        ("decoder.block.0.layer.2.DenseReluDense.wi_1", "mlp_gate"),
        ("decoder.block.0.layer.2.DenseReluDense.wo", "mlp_4h_to_h"),
        ("model.layers.0.mlp.shared_expert.gate_proj", "shared_expert_h_to_4h"),
        ("model.layers.0.block_sparse_moe.gate", "moe_router"),
        ("model.layers.0.block_sparse_moe.router", "moe_router"),
        ("model.layers.0.mlp.gate", "moe_router"),
        ("model.layers.0.mlp.router", "moe_router"),
        ("model.layers.0.mlp.shared_expert_gate", "mlp_router"),
        ("backbone.layers.0.mixer.in_proj", "mamba_in_proj"),
        ("q_proj", "attn_q"),
        ("lm_head", "lm_head"),
    ],
)
def test_a_path_is_known_by_its_longest_listed_end(path: str, name: str) -> None:
    assert name_of(path) == name


@pytest.mark.parametrize(
    "path",
    ["my_lm_head", "model.embed_positions", "model.layers.0.my_q_proj", "q_proj.bias", "", "gate"],
)
def test_a_path_that_only_resembles_a_module_is_none(path: str) -> None:
    assert module_of(path) is None


def test_the_attention_output_of_phi_2_is_known() -> None:
    assert name_of("model.layers.0.self_attn.dense") == "attn_dense"


@pytest.mark.parametrize("name", TENSORRT_LLM)
def test_a_module_name_means_itself(name: str) -> None:
    assert resolve_targets([name]) == {name: frozenset({name})}


def test_all_linear_means_itself() -> None:
    assert resolve_targets([ALL_LINEAR]) == {ALL_LINEAR: frozenset({ALL_LINEAR})}


@pytest.mark.parametrize(
    ("suffix", "names"),
    [
        ("k_proj", {"attn_k", "cross_attn_k"}),
        ("c_proj", {"attn_dense", "mlp_4h_to_h"}),
        ("attn.c_proj", {"attn_dense"}),
        ("gate_up_proj", {"mlp_gate_up"}),
        ("gate_proj", {"mlp_h_to_4h", "shared_expert_h_to_4h"}),
        ("dense", {"attn_dense"}),
        ("q", {"attn_q", "cross_attn_q"}),
        ("wi", {"mlp_h_to_4h"}),
    ],
)
def test_a_suffix_means_every_module_whose_path_may_end_so(suffix: str, names: set[str]) -> None:
    assert resolve_targets([suffix]) == {suffix: frozenset(names)}


def test_several_targets_are_resolved_each_on_its_own_in_their_order() -> None:
    resolved = resolve_targets(["v_proj", "attn_q"])
    assert list(resolved) == ["v_proj", "attn_q"]
    assert resolved["attn_q"] == {"attn_q"}


@pytest.mark.parametrize("target", ["attn_x", "proj", "Q_PROJ", "", " q_proj", "model.q_proj"])
def test_an_unknown_target_is_refused_with_the_list_of_the_known(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_targets(["attn_q", target])
    assert repr(target) in str(caught.value)
    assert all(known in str(caught.value) for known in ("all-linear", "attn_qkv", "q_proj"))


def test_every_known_target_resolves() -> None:
    assert all(resolve_targets(known_targets()).values())


def test_every_known_target_is_listed_once() -> None:
    known = known_targets()
    assert sorted(known) == sorted(set(known))
