"""MAX's manager: statuses, names, and the rows of a batch."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters.many_adapters import (
    MANIFEST,
    SLOTS,
    A,
    adapter_file,
    lies_in,
    slot_adapters,
    weights_of,
)

from trt_lora.plugins.errors import AdapterError, ConfigError, StateError, UnknownAdapterError
from trt_lora.runtime.interfaces.max import LoRAConfig, LoRAManager, LoRAStatus


@dataclass(frozen=True)
class Sequence:
    """What MAX calls a context."""

    model_name: str


def manager(**options: Any) -> LoRAManager:
    config = LoRAConfig(enable_lora=True, **options)
    return LoRAManager(config, slot_adapters(config.store_config(MANIFEST)))


def loaded(folder: Path, names: str = "abc") -> LoRAManager:
    made = manager()
    for name in names:
        assert made.load_adapter(f"{name}={adapter_file(folder, name)}") is LoRAStatus.SUCCESS
    return made


def test_statuses_have_the_values_of_max() -> None:
    assert [status.value for status in LoRAStatus] == [
        *("success", "load_name_exists", "unload_name_nonexistent", "load_error", "unload_error"),
        *("load_invalid_path", "load_invalid_adapter", "unspecified_error"),
    ]


def test_a_path_without_a_name_is_its_own(tmp_path: Path) -> None:
    made, path = manager(), str(adapter_file(tmp_path, "a"))
    assert made.load_adapter(path) is LoRAStatus.SUCCESS
    assert made.load_adapter(f"b={path}") is LoRAStatus.SUCCESS
    assert made.loras == [path, "b"]
    assert made.is_lora("b")
    assert not made.is_lora("a")
    made.adapters.check_integrity()


def test_the_same_name_and_path_again_is_a_success_and_another_path_is_not(tmp_path: Path) -> None:
    made = loaded(tmp_path, "ab")
    assert made.load_adapter(f"a={tmp_path}/./a.safetensors") is LoRAStatus.SUCCESS
    assert made.load_adapter(f"a={tmp_path}/b.safetensors") is LoRAStatus.LOAD_NAME_EXISTS
    made.activate_adapter("a")
    assert lies_in(made.adapters, "a", 0)


def test_a_refusal_is_a_status_and_its_reason_goes_to_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = manager()
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    with caplog.at_level(logging.WARNING):
        assert made.load_adapter(f"{tmp_path}/none") is LoRAStatus.LOAD_INVALID_PATH
        assert made.load_adapter("x=\0") is LoRAStatus.LOAD_INVALID_PATH
        broken = made.load_adapter(f"{tmp_path}/broken.safetensors")
        assert broken is LoRAStatus.LOAD_INVALID_ADAPTER
        assert made.load_adapter(f"={adapter_file(tmp_path, 'a')}") is (
            LoRAStatus.LOAD_INVALID_ADAPTER
        )
        assert made.unload_adapter("x") is LoRAStatus.UNLOAD_NAME_NONEXISTENT
    assert "load_invalid_path: " in caplog.text
    assert "an adapter needs a name" in caplog.text
    assert "unload_name_nonexistent: " in caplog.text
    assert made.loras == []


def test_an_unloaded_adapter_frees_its_name_and_its_slot(tmp_path: Path) -> None:
    made = loaded(tmp_path)
    made.activate_adapter("a")
    assert made.unload_adapter("a") is LoRAStatus.SUCCESS
    assert not made.is_active_lora("a")
    assert made.loras == ["b", "c"]
    assert made.load_adapter(f"a={tmp_path}/b.safetensors") is LoRAStatus.SUCCESS
    made.adapters.check_integrity()


def test_several_adapters_are_active_and_an_unknown_one_is_a_key_error(tmp_path: Path) -> None:
    made = loaded(tmp_path)
    for name in "ab":
        made.activate_adapter(name)
    assert [made.is_active_lora(name) for name in "abc"] == [True, True, False]
    with pytest.raises(KeyError):
        made.activate_adapter("x")
    made.adapters.check_integrity()


def test_a_batch_is_sorted_by_slot_from_the_highest_and_the_base_is_last(tmp_path: Path) -> None:
    made = loaded(tmp_path)
    for name in "ba":  # slots 0 and 1
        made.activate_adapter(name)
    batch = [Sequence(name) for name in ("", "c", "b", "a", "tiny", "b", "a")]
    names = [sequence.model_name for sequence in made.sort_lora_batch(batch)]
    assert names == ["a", "a", "b", "b", "c", "", "tiny"]
    assert not made.is_active_lora("c")
    with pytest.raises(UnknownAdapterError, match="a row names the adapter 'x'; loaded: a, b, c"):
        made.sort_lora_batch([Sequence("x")])


def test_graph_inputs_are_what_a_step_with_these_rows_binds(tmp_path: Path) -> None:
    made = loaded(tmp_path)
    inputs = made.get_lora_graph_inputs([Sequence(name) for name in ("a", "", "b", "a")])
    assert inputs["lora_slot"].numpy().tolist() == [0, -1, 1, 0]
    assert inputs.keys() == MANIFEST.lora_inputs
    assert {binding.name for binding in made.get_symbolic_inputs()} <= inputs.keys()
    with pytest.raises(UnknownAdapterError):
        made.get_lora_graph_inputs([Sequence("x")])
    with pytest.raises(StateError, match="3 adapters in one step"):
        made.get_lora_graph_inputs([Sequence(name) for name in "abc"])
    made.adapters.check_integrity()


def test_the_adapters_of_a_step_stay_until_the_next_whatever_is_unloaded(tmp_path: Path) -> None:
    made = loaded(tmp_path)
    for _ in range(2):
        made.get_lora_graph_inputs([Sequence("a")])
    assert made.adapters.stats.leased == 1
    assert made.unload_adapter("a") is LoRAStatus.SUCCESS
    for name in "bc":
        made.activate_adapter(name)
    assert lies_in(made.adapters, "a", 0)
    with pytest.raises(UnknownAdapterError):
        made.get_lora_graph_inputs([Sequence("a")])
    assert made.load_adapter(f"a={tmp_path}/b.safetensors") is LoRAStatus.SUCCESS
    step = made.get_lora_graph_inputs([Sequence("a"), Sequence("c")])
    slots = step["lora_slot"].numpy().tolist()
    given = weights_of("b")[A]
    assert np.array_equal(step[A].numpy()[slots[0]][:, : given.shape[1]], given)
    made.close()
    assert made.adapters.stats.leased == 0
    made.adapters.check_integrity()


def test_the_adapters_of_the_config_are_loaded_at_once(tmp_path: Path) -> None:
    path = adapter_file(tmp_path, "a")
    assert manager(lora_paths=(f"one={path}", str(path))).loras == ["one", str(path)]
    with pytest.raises(AdapterError, match=r"lora_paths: '/none' does not exist"):
        manager(lora_paths=("/none",))


def test_an_option_holds_or_is_refused() -> None:
    assert manager(max_num_loras=1, max_lora_rank=16).adapters.stats.slots == 1
    with pytest.raises(ConfigError, match="max_num_loras is 3, this engine has 2 slots"):
        manager(max_num_loras=3)
    with pytest.raises(ConfigError, match=r"max_lora_rank is 8, this engine .* up to rank 16"):
        manager(max_lora_rank=8)
    two = slot_adapters()
    with pytest.raises(ConfigError, match=r"max_num_loras is 1, .* 2 slots; .*store_config"):
        LoRAManager(LoRAConfig(enable_lora=True, max_num_loras=1), two)
    with pytest.raises(ConfigError, match="enable_lora is False"):
        LoRAManager(LoRAConfig(), two)


def test_there_is_a_manager_where_lora_is_on() -> None:
    adapters, on = slot_adapters(), LoRAConfig(enable_lora=True)
    found = LoRAManager.get_lora_manager(on, adapters)
    assert found is not None
    assert found.adapters.stats.slots == SLOTS
    assert LoRAManager.get_lora_manager(LoRAConfig(), adapters) is None
    assert LoRAManager.get_lora_manager(on, None) is None


def test_requests_are_refused_without_endpoints() -> None:
    with pytest.raises(StateError, match="pass zmq_endpoint_base"):
        manager().process_lora_requests()


def test_an_adapter_cannot_have_the_base_models_name(tmp_path: Path) -> None:
    made, base = manager(), MANIFEST.base_model.name
    status = made.load_adapter(f"{base}={adapter_file(tmp_path, 'a')}")
    assert status is LoRAStatus.LOAD_NAME_EXISTS
    assert not made.is_lora(base)
    outcome = made.load(base, str(tmp_path / "a.safetensors"))
    assert "is the base model's name: rows that name it take no adapter" in outcome.message
    with pytest.raises(AdapterError, match=r"lora_paths: .*is the base model's name"):
        manager(lora_paths=(f"{base}={tmp_path}/a.safetensors",))
    assert made.get_lora_graph_inputs([Sequence(base)])["lora_slot"].numpy().tolist() == [-1]


@pytest.mark.parametrize(
    "option", ["base_model_path", "base_dtype", "n_heads", "n_kv_heads", "head_dim"]
)
def test_what_max_says_of_its_base_model_is_refused_by_name(option: str) -> None:
    value: object = "org/model" if option == "base_model_path" else 8
    adapters, given = slot_adapters(), {option: value}
    with pytest.raises(ConfigError, match=rf"{option} is {value!r}: that is the engine"):
        LoRAManager(LoRAConfig(enable_lora=True), adapters, **given)  # type: ignore[arg-type]


def test_maxs_positional_arguments_are_refused_with_ours() -> None:
    theirs: Any = LoRAManager
    with pytest.raises(ConfigError, match=r"adapters is 'org/model' .*, expected AdapterStore"):
        theirs(LoRAConfig(enable_lora=True), "org/model", "bfloat16")
