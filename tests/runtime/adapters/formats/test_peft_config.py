"""`adapter_config.json`: rank and scale as in PEFT; what changes the result is refused."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from support.refusals import refused
from transformers import LlamaConfig, LlamaForCausalLM

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.formats.peft_config import PeftConfig, read_peft_config

pytestmark = pytest.mark.needs_torch

TARGETS = ["q_proj", "v_proj", "down_proj"]

# PEFT 0.21 asks transformers 5.23 by a name that is on its way out.
PEFT_WARNS = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")


def config_from(directory: Path, fields: object) -> PeftConfig:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")
    return read_peft_config(directory)


def lora(**fields: object) -> dict[str, object]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}


def assert_refused(directory: Path, fields: object, *messages: str) -> None:
    """Refused with the file and every one of the messages."""
    with refused(AdapterError, directory / "adapter_config.json", *messages):
        config_from(directory, fields)


# ------------------------------------------------------------------------------ against PEFT itself


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=12,  # layer 1 and layer 11 must not be mixed up
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def lora_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name.removeprefix("base_model.model."), module


@PEFT_WARNS
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"r": 4, "lora_alpha": 16},
        {"r": 3, "lora_alpha": 7, "use_rslora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 32}},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 32}, "use_rslora": True},
        {"rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 3}},
        {"rank_pattern": {"q_proj": 3, "layers.1.self_attn.q_proj": 2}},
        {"rank_pattern": {"self_attn.q_proj": 2}},
        {"rank_pattern": {r"model\.layers\.1\..*": 5}, "alpha_pattern": {r"layers.\d.mlp.*": 1}},
        {"rank_pattern": {"^model.layers.1.self_attn.q_proj": 6, "q_proj|v_proj": 7}},
        {"alpha_pattern": {".*q_proj": 0.5, "model.layers.11.mlp.down_proj": 3}},
    ],
)
def test_rank_and_scale_of_every_module_are_those_of_peft(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    LoraConfig(target_modules=TARGETS, **fields).save_pretrained(str(tmp_path))  # sorts the keys
    model = get_peft_model(tiny_llama(), LoraConfig.from_pretrained(str(tmp_path)))
    config = read_peft_config(tmp_path)
    layers = dict(lora_layers(model))
    assert len(layers) == 12 * len(TARGETS)
    for path, layer in layers.items():
        assert config.rank(path) == layer.r["default"], path
        assert config.scale(path) == pytest.approx(layer.scaling["default"], rel=1e-12), path


def test_the_defaults_are_those_of_peft(tmp_path: Path) -> None:
    config, peft = config_from(tmp_path, {"peft_type": "LORA"}), LoraConfig()
    assert (config.r, config.lora_alpha) == (peft.r, peft.lora_alpha)
    assert config.use_rslora is peft.use_rslora


def test_every_field_of_this_release_of_peft_is_known(tmp_path: Path) -> None:
    unknown = []
    for field in dataclasses.fields(LoraConfig):
        try:
            config_from(tmp_path, lora(**{field.name: "something"}))
        except AdapterError as error:
            unknown += [field.name] if "does not know" in str(error) else []
    assert unknown == []


def test_a_plain_config_as_peft_saves_it_is_taken(tmp_path: Path) -> None:
    LoraConfig(r=4, target_modules=TARGETS, base_model_name_or_path="some/base").save_pretrained(
        str(tmp_path)
    )
    assert read_peft_config(tmp_path) == PeftConfig(4, 8, base_model="some/base")


# --------------------------------------------------------------------------------------- arithmetic


def test_the_scale_is_alpha_by_r_and_with_rslora_alpha_by_its_root() -> None:
    assert PeftConfig(r=16, lora_alpha=8).scale("x") == 0.5
    assert PeftConfig(r=16, lora_alpha=8, use_rslora=True).scale("x") == 2.0


def test_the_rank_of_the_pattern_decides_the_scale_too() -> None:
    config = PeftConfig(8, 8, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 4})
    assert [config.rank(path) for path in ("a.q_proj", "a.v_proj")] == [2, 8]
    assert [config.scale(path) for path in ("a.q_proj", "a.v_proj")] == [4.0, 0.5]


@pytest.mark.parametrize("path", ["a.my_q_proj", "q_proj.b", "q_projection", "Q_PROJ"])
def test_a_pattern_matches_whole_parts_at_the_end_of_a_path(path: str) -> None:
    assert PeftConfig(8, 8, rank_pattern={"q_proj": 2}).rank(path) == 8


# ----------------------------------------------------------------------------------- refused fields

REFUSED: dict[str, object] = {
    "modules_to_save": ["lm_head", "norm"],
    "target_parameters": ["mlp.experts.gate_up_proj_bias"],
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "monteclora_config": {"num_samples": 8},
    "kasa_config": {"beta": 1e-4},
    "arrow_config": {"top_k": 3},
    "layer_replication": [[0, 4], [2, 5]],
    "megatron_config": {"tensor_model_parallel_size": 2},
}


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_a_field_that_changes_the_result_is_refused_by_name(
    tmp_path: Path, name: str, value: object
) -> None:
    assert_refused(tmp_path, lora(**{name: value}), f"{name} is {value!r}: ")


@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "unheard-of"]
)
def test_an_initialisation_that_changed_the_base_is_refused(tmp_path: Path, init: str) -> None:
    needed = "path_initial_model_for_weight_conversion"
    assert_refused(tmp_path, lora(init_lora_weights=init), f"init_lora_weights is {init!r}", needed)


@pytest.mark.parametrize("init", [["pissa"], {"pissa": 1}, 2.5])
def test_an_initialisation_that_is_no_word_is_refused(tmp_path: Path, init: object) -> None:
    assert_refused(tmp_path, lora(init_lora_weights=init), "init_lora_weights is")


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_an_initialisation_that_leaves_the_base_alone_is_taken(
    tmp_path: Path, init: object
) -> None:
    assert config_from(tmp_path, lora(init_lora_weights=init)).r == 4


@pytest.mark.parametrize("value", [True, 1, "on", {"a": 1}, [0]])
def test_a_field_nobody_knows_is_refused_by_name(tmp_path: Path, value: object) -> None:
    fields = lora(use_lora_of_tomorrow=value)
    assert_refused(tmp_path, fields, f"use_lora_of_tomorrow is {value!r}", "update trt-lora")


@pytest.mark.parametrize("name", [*REFUSED, "use_lora_of_tomorrow"])
@pytest.mark.parametrize("value", [None, False])
def test_a_field_that_is_unset_is_taken(tmp_path: Path, name: str, value: object) -> None:
    assert config_from(tmp_path, lora(**{name: value})) == PeftConfig(4, 8)


@pytest.mark.parametrize("kind", ["IA3", "ADALORA", "lora", None, ["LORA"]])
def test_another_kind_of_adapter_is_refused(tmp_path: Path, kind: object) -> None:
    assert_refused(tmp_path, lora(peft_type=kind), f"peft_type is {kind!r}; only 'LORA'")


# ------------------------------------------------------------------------------------ damaged files


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json: .*save_pretrained"):
        read_peft_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ('{"r": 4,}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "holds a list, not an object"),
        ("null", "holds a NoneType"),
        ("{}", "peft_type is None"),
        ('{"peft_type": "LORA", "r": 1' + "0" * 5000 + "}", ""),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert_refused(tmp_path, text, message)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AdapterError, match="is not JSON"):
        read_peft_config(tmp_path)


@pytest.mark.parametrize("name", ["r", "lora_alpha"])
@pytest.mark.parametrize(
    "value",
    [None, "8", True, [8], math.nan, math.inf, pytest.param(10**400, id="10**400")],
)
def test_a_rank_or_alpha_that_is_no_finite_number_is_refused(
    tmp_path: Path, name: str, value: object
) -> None:
    assert_refused(tmp_path, lora(**{name: value}), f"{name} is ", "expected a number")


@pytest.mark.parametrize("rank", [0, -1, 2.5])
@pytest.mark.parametrize("form", ["r", "pattern"])
def test_a_rank_that_is_no_whole_number_from_1_is_refused(
    tmp_path: Path, rank: float, form: str
) -> None:
    fields = lora(r=rank) if form == "r" else lora(rank_pattern={"q_proj": rank})
    assert_refused(tmp_path, fields, f"a rank is {rank}; ranks are whole numbers from 1")


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "pattern", [["q_proj"], "q_proj", {"q_proj": "2"}, {"q_proj": None}, {"(": 2}, {"(?i)q": 2}]
)
def test_a_pattern_that_means_nothing_is_refused_by_its_field(
    tmp_path: Path, name: str, pattern: object
) -> None:
    assert_refused(tmp_path, lora(**{name: pattern}), name)


@pytest.mark.parametrize("value", ["false", "true", 2, [0]])
def test_a_switch_that_is_neither_true_nor_false_is_refused(tmp_path: Path, value: object) -> None:
    assert_refused(tmp_path, lora(use_rslora=value), f"use_rslora is {value!r}")
