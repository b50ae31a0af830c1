"""The contract's names and shapes, as engines and adapters spell them."""

import pytest

from trt_lora.plugins.contract.sites import (
    FACTORS,
    BindingNames,
    Factor,
    Site,
    parse_binding,
    split_at_layer,
)

PATH = "model.layers.3.self_attn.q_proj"
PATHS = (PATH, "transformer.h.11.attn.c_proj", "lm_head", "x.lora_A_y", "a b/c:0")


def site(path: str = PATH) -> Site:
    return Site(path, 8, 6, "float16")


@pytest.mark.parametrize(
    ("names", "factor", "expected"),
    [
        (BindingNames.LORA, "A", "lora_A_model.layers.3.self_attn.q_proj"),
        (BindingNames.LORA, "B", "lora_B_model.layers.3.self_attn.q_proj"),
        (BindingNames.EDGELLM, "A", "model.layers.3.self_attn.q_proj.lora_A.weight"),
        (BindingNames.EDGELLM, "B", "model.layers.3.self_attn.q_proj.lora_B.weight"),
    ],
)
def test_a_binding_is_spelled_as_its_profile_says(
    names: BindingNames, factor: Factor, expected: str
) -> None:
    assert names.binding(factor, PATH) == expected
    assert names.pair(PATH)[FACTORS.index(factor)] == expected


@pytest.mark.parametrize("names", BindingNames)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("factor", ["A", "B"])
def test_a_binding_is_parsed_back_to_factor_and_path(
    names: BindingNames, path: str, factor: Factor
) -> None:
    assert parse_binding(names.binding(factor, path)) == (factor, path)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "logits",
        "input_ids",
        "lora_slot",
        "lora_rank",
        "lora_A_",
        "lora_C_q_proj",
        "LORA_A_q_proj",
        ".lora_A.weight",
        "q_proj.lora_A.weight.extra",
        "q_proj.lora_A",
        "past_key_values.0.key",
    ],
)
def test_other_inputs_are_no_lora_bindings(name: str) -> None:
    assert parse_binding(name) is None


@pytest.mark.parametrize("names", BindingNames)
def test_every_site_has_a_rank_symbol_of_its_own_in_each_spelling(names: BindingNames) -> None:
    assert len({names.rank_symbol(path) for path in PATHS}) == len(PATHS)


def test_the_edgellm_rank_symbol_is_the_one_that_its_runtime_reads() -> None:
    assert BindingNames.EDGELLM.rank_symbol(PATH) == f"{PATH}.rank"


def test_the_profiles_are_called_as_the_command_line_calls_them() -> None:
    assert [BindingNames("lora"), BindingNames("edgellm")] == list(BindingNames)


def test_a_is_k_by_rank_and_b_is_rank_by_n() -> None:
    assert site().shape("A", 4) == (8, 4)
    assert site().shape("B", 4) == (4, 6)


def test_a_site_knows_its_module_by_the_end_of_its_path() -> None:
    module = site().module
    assert module is not None
    assert (module.id, module.name) == (1, "attn_q")


def test_a_site_outside_the_module_table_has_no_module() -> None:
    assert site("model.vision.patch_embedding").module is None


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        (PATH, 3),
        ("transformer.h.11.attn.c_proj", 11),
        ("model.layers.0.mlp.experts.7.w1", 0),
        ("lm_head", None),
        ("model.layer3.fc1", None),
    ],
)
def test_the_layer_is_the_first_number_in_the_path(path: str, layer: int | None) -> None:
    assert site(path).layer == layer


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        (PATH, ("model.layers", 3, "self_attn.q_proj")),
        ("model.layers.0.mlp.experts.7.w1", ("model.layers", 0, "mlp.experts.7.w1")),
        ("lm_head", ("", None, "lm_head")),
        (f"h.{'9' * 5000}.fc1", ("", None, f"h.{'9' * 5000}.fc1")),
    ],
)
def test_a_path_is_split_at_its_layer(path: str, parts: tuple[str, int | None, str]) -> None:
    assert split_at_layer(path) == parts
