"""Every field of PEFT's LoraConfig is honoured exactly, has no effect, or is refused by name."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from support.adapters.peft_field_table import FIELDS, Taken, randomised, saved_config
from support.adapters.peft_fields import (
    PREFIX,
    Q_AND_V,
    Refused,
    Running,
    assert_answers_as_peft,
    assert_refused,
    base_of,
    difference,
    loaded,
    lora,
    prompt,
)
from support.models.tiny_models import save_adapter

from trt_lora.builder.suppress_output import suppress_output
from trt_lora.runtime import load_adapter
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.slow  # for the engines that all of them share

Entry = tuple[str, Taken | Refused]
CASES: list[Entry] = [(field, case) for field, cases in FIELDS.items() for case in cases]


def of_kind(kind: type[Taken | Refused]) -> list[Any]:
    """The cases of one kind, named by field and place in the table."""
    return [
        pytest.param(field, case, id=f"{field}-{FIELDS[field].index(case)}")
        for field, case in CASES
        if isinstance(case, kind)
    ]


@pytest.fixture(scope="module")
def made(
    running: dict[str, Running], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Taken | Refused], Path]:
    """Make the adapter of a case, once."""

    @cache
    def make(case: Taken | Refused) -> Path:
        return case.make(running[case.model].model, tmp_path_factory.mktemp("made") / "a")

    return make


def layers_of(reference: PeftReference) -> dict[str, Any]:
    """PEFT's own layers by the path of the module that each adapts."""
    return {
        name.removeprefix(PREFIX): module
        for name, module in reference.model.named_modules()
        if isinstance(module, LoraLayer)
    }


def test_the_table_has_every_field_of_this_release_of_peft() -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(LoraConfig)}
    assert [field for field, cases in FIELDS.items() if not cases] == []


@pytest.mark.parametrize(("field", "case"), of_kind(Taken))
def test_an_adapter_that_is_taken_answers_as_in_peft(
    running: dict[str, Running],
    made: Callable[[Taken], Path],
    field: str,
    case: Taken,
) -> None:
    at, adapter = running[case.model], made(case)
    default = next(f.default for f in dataclasses.fields(LoraConfig) if f.name == field)
    assert saved_config(adapter).get(field, "not saved") != default  # the case is about the field
    coverage, ours = loaded(at, adapter)
    layers = layers_of(assert_answers_as_peft(at, adapter, ours))
    assert {site.path: site.rank for site in coverage.adapted} == {
        path: layer.r["a"] for path, layer in layers.items()
    }
    for site in coverage.adapted:
        scale = layers[site.path].scaling["a"]
        assert list(site.scales) == pytest.approx([scale], rel=1e-12)
    assert coverage.unexpected_keys == {}
    assert [case.warning in warning for warning in coverage.warnings] == [True] * bool(case.warning)


@pytest.mark.parametrize(("field", "case"), of_kind(Taken))
def test_the_config_of_an_adapter_that_is_taken_targets_what_its_file_holds(
    running: dict[str, Running],
    made: Callable[[Taken], Path],
    field: str,
    case: Taken,
) -> None:
    at = running[case.model]
    adapter = load_adapter(made(case))
    assert adapter.targets is not None, field
    targeted = {site.path for site in at.engine.manifest.sites if adapter.targets(site.path)}
    assert targeted == adapter.ranks.keys()


@pytest.mark.parametrize(("field", "case"), of_kind(Refused))
def test_an_adapter_that_is_refused_is_refused_by_field_and_value_with_advice(
    running: dict[str, Running],
    made: Callable[[Refused], Path],
    field: str,
    case: Refused,
) -> None:
    at, adapter = running[case.model], made(case)
    named = case.tensor or f"{field} is {saved_config(adapter)[field]!r}"
    assert_refused(at, adapter, named, case.advice.replace("{adapter}", str(adapter)))


def test_patterns_whose_order_the_file_loses_are_refused_as_peft_refuses_them(
    llama: Running, tmp_path: Path
) -> None:
    ranks = {"q_proj": 5, "layers.1.self_attn.q_proj": 3}  # the first one decides
    adapter = save_adapter(llama.model, tmp_path / "a", rank_pattern=ranks)
    assert list(saved_config(adapter)["rank_pattern"]) == sorted(ranks)  # PEFT saves sorted keys
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftReference(llama.model, {"a": adapter})
    assert_refused(llama, adapter, "q_proj", "rank 5, but the config says rank 3")


def test_the_conversion_that_the_refusal_of_pissa_advises_gives_an_adapter_that_is_taken(
    llama: Running, tmp_path: Path
) -> None:
    with suppress_output():
        config = lora(r=4, target_modules=Q_AND_V, init_lora_weights="pissa")
        adapted: Any = get_peft_model(base_of(llama.model), config)
        adapted.peft_config["default"].init_lora_weights = True  # as PEFT's guide to PiSSA says
        adapted.save_pretrained(str(tmp_path / "initial"))
        adapted.peft_config["default"].init_lora_weights = "pissa"
        randomised(adapted).save_pretrained(
            str(tmp_path / "a"), path_initial_model_for_weight_conversion=str(tmp_path / "initial")
        )
        ids, mask = (torch.from_numpy(array) for array in prompt())
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.inference_mode():
            trained = adapted(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    coverage, ours = loaded(llama, tmp_path / "a")
    assert_answers_as_peft(llama, tmp_path / "a", ours)
    assert difference(ours, trained.numpy()) < 1e-3  # the conversion itself rounds
    assert {site.rank for site in coverage.adapted} == {8}
