"""The rule for which modules a config targets is PEFT's own, or says that it cannot tell."""

import itertools
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from support.adapters.peft_cases import CONFIGS, NOWHERE, UNTOLD

from trt_lora.runtime.adapters.formats.peft_targets import FIELDS, target_rule

pytestmark = pytest.mark.needs_torch

_PARTS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.qkv.q_proj", "mlp.up_proj", "q_proj")
_STEMS = (
    "model.layers.0",
    "model.layers.1",
    "model.layers.11",
    "layers.1",
    "transformer.h.1",
    "h.0",
)
PATHS = [
    *(f"{stem}.{part}" for stem, part in itertools.product(_STEMS, _PARTS)),
    *(
        "q_proj",
        "lm_head",
        "embed_out",
        "model.layers.1.experts.0.q_proj",
        "x.1.q_proj",
        "1.q_proj",
    ),
    *(
        "model.layers.1",
        "my_q_proj",
        "model.layers.0.self_attn.q_proj.inner",
        "a..q_proj",
        "q_proj.",
    ),
]


def of_peft(fields: dict[str, Any], path: str) -> bool:
    return bool(check_target_module_exists(LoraConfig(**fields), path))


@pytest.mark.parametrize("fields", CONFIGS + NOWHERE, ids=str)
def test_the_rule_is_that_of_peft_for_every_path(fields: dict[str, Any]) -> None:
    rule = target_rule(fields)
    assert {path: rule(path) for path in PATHS} == {path: of_peft(fields, path) for path in PATHS}


@pytest.mark.parametrize("name", ["all-linear", "All-Linear"])
def test_all_linear_is_every_path_but_that_of_the_output_head(name: str) -> None:
    rule = target_rule({"target_modules": name, "exclude_modules": ["v_proj"]})
    assert {path for path in PATHS if not rule(path)} == {
        path for path in PATHS if path in ("lm_head", "embed_out") or path.endswith(".v_proj")
    }


@pytest.mark.parametrize("fields", UNTOLD, ids=str)
def test_what_cannot_be_told_is_neither_yes_nor_no(fields: dict[str, Any]) -> None:
    assert target_rule(fields)("model.layers.0.self_attn.q_proj") is None


def test_what_is_certain_is_told_where_another_field_is_not() -> None:
    rule = target_rule({"target_modules": ["q_proj"], "exclude_modules": "(a|b)*(c|d)+"})
    assert rule("model.layers.0.mlp.up_proj") is False
    assert rule("model.layers.0.self_attn.q_proj") is None


def test_a_list_that_peft_may_shorten_leaves_only_other_layers_open() -> None:
    names = [f"model.layers.{number}.self_attn.q_proj" for number in range(20)]
    rule = target_rule({"target_modules": names, "layers_to_transform": [1]})
    assert [rule(name) for name in names[:3]] == [None, True, None]
    short = target_rule({"target_modules": names[:19], "layers_to_transform": [1]})
    assert [short(name) for name in names[:3]] == [True, True, True]


def test_the_time_for_patterns_is_shared_by_all_paths() -> None:
    fields = {"target_modules": r".*layers.*proj.*"}
    path = "model.layers.0.self_attn.q_proj"
    assert target_rule(fields, 10)(path) is True
    assert target_rule(fields, 10_000_000)(path) is None


def test_a_pattern_is_not_matched_with_a_path_beyond_all_measure() -> None:
    path = "a." * 200 + "q_proj"
    assert target_rule({"target_modules": ".*q_proj"})(path) is None
    assert target_rule({"target_modules": ["q_proj"]})(path) is True


def test_every_field_that_the_rule_reads_is_one_of_peft() -> None:
    assert set(FIELDS) <= {*LoraConfig.__dataclass_fields__}
