"""vLLM's managers and adapters that leave behind their backs: gone is gone, for both."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from support.adapters.many_adapters import MANIFEST, SLOTS, adapter_file, slot_adapters, weights_of

from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.interfaces.vllm import (
    LoRAConfig,
    LoRALayerWeights,
    LoRAModel,
    LoRAModelManager,
    LoRARequest,
    LRUCacheLoRAModelManager,
    WorkerLoRAManager,
)
from trt_lora.runtime.store.config import StoreConfig

NBYTES = sum(array.nbytes for array in weights_of("a").values())


def manager(cache: StoreConfig | None = None, **options: Any) -> LRUCacheLoRAModelManager:
    return LRUCacheLoRAModelManager(LoRAConfig(**options), slot_adapters(cache))


def model(id: int) -> LoRAModel:
    """An adapter in memory, which cannot be read again."""
    weights = weights_of("a")
    layers = {
        site.path: LoRALayerWeights(weights[f"lora_A_{site.path}"], weights[f"lora_B_{site.path}"])
        for site in MANIFEST.sites
    }
    return LoRAModel.of_layers(id, layers)


def request(folder: Path, id: int) -> LoRARequest:
    path = folder / f"{id}.safetensors"
    save_file(weights_of("a"), path)
    return LoRARequest("abcdef"[id - 1], id, str(path))


def test_an_evicted_adapter_is_not_registered_and_may_come_again() -> None:
    made = manager(StoreConfig(host_memory=2 * NBYTES + NBYTES // 2), max_cpu_loras=4)
    for id in range(1, 6):
        assert made.add_adapter(model(id))
    assert list(made.list_adapters()) == [4, 5]
    assert made.get_adapter(1) is None
    assert not made.remove_adapter(1)
    with pytest.raises(KeyError, match="LoRA 1 is not registered; registered: 4, 5"):
        made.activate_adapter(1)
    assert made.add_adapter(model(1))
    assert made.activate_adapter(1)
    made.remove_all_adapters()
    assert made.list_adapters() == {}
    made.adapters.check_integrity()
    assert made.adapters.names == ()


@pytest.mark.parametrize("is_active", [False, True])
def test_an_adapter_unloaded_behind_the_manager_is_gone_for_it_too(
    tmp_path: Path, is_active: bool
) -> None:
    made = manager()
    worker = WorkerLoRAManager(made)
    worker.add_adapter(request(tmp_path, 1))
    if not is_active:
        made.deactivate_adapter(1)
    made.adapters.unload("a")
    assert worker.list_adapters() == set()
    assert made.lora_index_to_id == [None] * SLOTS
    assert not made.remove_adapter(1)
    assert worker.add_adapter(request(tmp_path, 1))
    assert made.lora_index_to_id == [1, *[None] * (SLOTS - 1)]
    made.remove_all_adapters()
    made.adapters.check_integrity()
    assert made.adapters.stats.leased == 0


def test_an_adapter_replaced_behind_the_manager_is_another_one(tmp_path: Path) -> None:
    made = manager()
    worker = WorkerLoRAManager(made)
    worker.add_adapter(request(tmp_path, 1))
    made.pin_adapter(1)
    made.adapters.load("a", adapter_file(tmp_path, "b"), replace=True)
    assert made.list_adapters() == {}
    assert not made.remove_adapter(1)
    assert made.adapters.names == ("a",)  # it is not the manager's to unload
    with pytest.raises(AdapterError, match="an adapter named 'a' is loaded already"):
        worker.add_adapter(request(tmp_path, 1))
    assert made.list_adapters() == {}
    made.adapters.check_integrity()


def test_an_activation_that_fails_leaves_the_others_registered_and_takes_no_slot(
    tmp_path: Path,
) -> None:
    made = manager(max_cpu_loras=5)
    worker = WorkerLoRAManager(made)
    worker.add_adapter(request(tmp_path, 1))
    made.adapters.unload("a")
    made.adapters.register("a", tmp_path / "1.safetensors")
    for id in range(2, SLOTS + 2):
        worker.add_adapter(request(tmp_path, id))
    before = made.lora_index_to_id
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(AdapterError):
        made.adapters.bindings.activate("a")
    assert made.lora_index_to_id == before
    assert list(made.list_adapters()) == list(range(2, SLOTS + 2))
    made.adapters.check_integrity()


def test_a_config_with_room_for_fewer_adapters_than_slots_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_cpu_loras \(1\) must be >= max_loras \(2\)"):
        LoRAConfig(max_loras=2, max_cpu_loras=1)
    with pytest.raises(ValueError, match=rf"max_cpu_loras \(1\) must be >= max_loras \({SLOTS}\)"):
        manager(max_cpu_loras=1)
    assert LoRAConfig(max_loras=2, max_cpu_loras=2).max_cpu_loras == 2


def test_classes_are_called_as_vllms() -> None:
    assert repr(LoRARequest("a", 1, "/a")).startswith("LoRARequest(")
    assert repr(LoRAConfig(max_loras=3)).startswith("LoRAConfig(")
    theirs: Any = LoRAModelManager
    with pytest.raises(ConfigError, match=r"adapters is 'model' .*, expected AdapterStore"):
        theirs(LoRAConfig(), "model")
