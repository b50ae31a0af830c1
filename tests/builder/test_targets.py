"""Target modules: what they include, why they leave the rest out, and which match nothing."""

import pytest

from trt_lora.builder.targets import LeftAlone, Targets, check_targets_matched
from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import ConfigError

Q = "model.layers.0.self_attn.q_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"
HEAD = "lm_head"
ADDED = "model.layers.0.added"  # of no known module


def site(path: str) -> Site:
    return Site(path, 4, 8, "float32")


def test_a_named_module_is_included_and_another_is_refused_with_a_reason() -> None:
    targets = Targets.from_names(["q_proj"])
    assert targets.includes(Q)
    assert targets.refusal(O_PROJ) == "attn_dense is not a target"
    assert targets.refusal(ADDED) == "its module is not a target"


def test_all_linear_includes_unknown_modules_and_leaves_out_the_head() -> None:
    targets = Targets.from_names(["all-linear"])
    assert targets.includes(ADDED, HEAD)
    assert targets.refusal(HEAD, HEAD) == "it is the output head"
    assert targets.includes(HEAD)  # where the caller does not say which module the head is


def test_the_head_is_included_when_it_is_named() -> None:
    assert Targets.from_names(["all-linear", "lm_head"]).includes(HEAD, HEAD)


def test_names_that_match_no_site_are_listed_in_the_order_given() -> None:
    targets = Targets.from_names(["up_proj", "q_proj", "o_proj"])
    assert targets.unmatched([Q]) == ["up_proj", "o_proj"]
    assert targets.unmatched([Q, O_PROJ, "model.layers.0.mlp.up_proj"]) == []


def test_all_linear_is_unmatched_only_without_sites() -> None:
    targets = Targets.from_names(["all-linear"])
    assert targets.unmatched([ADDED]) == []
    assert targets.unmatched([]) == ["all-linear"]


def test_the_error_names_the_target_and_every_module_that_there_is() -> None:
    targets, left_alone = (
        Targets.from_names(["q_proj", "up_proj"]),
        [LeftAlone(O_PROJ, "not a target")],
    )
    with pytest.raises(ConfigError, match=r"'up_proj'; it has: attn_dense, attn_q$"):
        check_targets_matched(targets, [site(Q)], left_alone)
    check_targets_matched(Targets.from_names(["q_proj"]), [site(Q)], left_alone)
