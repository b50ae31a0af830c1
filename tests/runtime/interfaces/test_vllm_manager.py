"""vLLM's managers: numbers, slots and capacity, and what their calls return."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters.many_adapters import (
    MANIFEST,
    SLOTS,
    A,
    adapter_file,
    lies_in,
    slot_adapters,
    weights_of,
)
from support.adapters.trtllm_files import FUSED_QKV
from support.fakes.adapter_files import stacks_of
from support.fakes.fake_engine import FakeExecutor, make_weights, write_peft

from trt_lora.plugins.errors import AdapterError, StateError, UnknownAdapterError
from trt_lora.runtime.interfaces.vllm import (
    LoRAConfig,
    LoRALayerWeights,
    LoRAMapping,
    LoRAModel,
    LoRAModelManager,
    LoRARequest,
    LRUCacheLoRAModelManager,
    WorkerLoRAManager,
)
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.store import AdapterStore

NAMES = dict(enumerate("abcdef", start=1))


def manager(*, lru: bool = False, **options: Any) -> LoRAModelManager:
    config = LoRAConfig(**options)
    kind = LRUCacheLoRAModelManager if lru else LoRAModelManager
    return kind(config, slot_adapters(config.store_config(MANIFEST)))


def model(id: int) -> LoRAModel:
    """The adapter of a number, in memory."""
    weights = weights_of(NAMES[id])
    return LoRAModel.of_layers(
        id,
        {
            site.path: LoRALayerWeights(
                weights[f"lora_A_{site.path}"], weights[f"lora_B_{site.path}"]
            )
            for site in MANIFEST.sites
        },
    )


def with_adapters(count: int, *, lru: bool = False, **options: Any) -> LoRAModelManager:
    made = manager(lru=lru, **options)
    for id in range(1, count + 1):
        assert made.add_adapter(model(id))
    return made


def active(of: LoRAModelManager) -> set[int | None]:
    return set(of.lora_index_to_id) - {None}


def test_an_adapter_is_added_once_and_removed_once() -> None:
    made = with_adapters(2)
    assert not made.add_adapter(model(1))
    assert list(made.list_adapters()) == [1, 2]
    assert made.list_adapters()[1].check_lora_name(MANIFEST.sites[0].path)
    assert made.remove_adapter(1)
    assert not made.remove_adapter(1)
    assert made.get_adapter(1) is None
    assert made.get_adapter(2) is made.list_adapters()[2]
    made.remove_all_adapters()
    assert made.list_adapters() == {}
    assert made.adapters.names == ()
    made.adapters.check_integrity()


def test_an_adapter_is_activated_once_stays_in_its_slot_and_is_let_go_once() -> None:
    made = with_adapters(2)
    assert made.activate_adapter(2)
    assert not made.activate_adapter(2)
    assert made.lora_index_to_id == [2, None]
    assert lies_in(made.adapters, "b", 0)
    assert made.deactivate_adapter(2)
    assert not made.deactivate_adapter(2)
    assert made.lora_index_to_id == [None, None]
    with pytest.raises(KeyError):
        made.activate_adapter(9)
    made.adapters.check_integrity()


def test_no_slot_is_free_until_an_adapter_is_deactivated() -> None:
    made = with_adapters(3)
    for id in (1, 2):
        made.activate_adapter(id)
    with pytest.raises(ValueError, match="No free lora slots: max_loras is 2; deactivate"):
        made.activate_adapter(3)
    made.deactivate_adapter(1)
    assert made.activate_adapter(3)
    assert active(made) == {2, 3}
    assert lies_in(made.adapters, "c", 0)
    made.adapters.check_integrity()


def test_a_full_registry_is_a_runtime_error_and_lru_forgets_the_oldest() -> None:
    full = with_adapters(2, max_cpu_loras=2)
    with pytest.raises(RuntimeError, match="No free adapter slots: max_cpu_loras is 2; remove"):
        full.add_adapter(model(3))
    lru = with_adapters(2, lru=True, max_cpu_loras=2)
    assert not lru.add_adapter(model(1))  # used
    assert lru.add_adapter(model(3))
    assert list(lru.list_adapters()) == [1, 3]
    assert (lru.capacity, lru.lora_slots) == (2, SLOTS)
    lru.adapters.check_integrity()


def test_lru_takes_the_slot_of_the_least_recently_used() -> None:
    made = with_adapters(3, lru=True)
    for id in (1, 2, 1):
        made.activate_adapter(id)
    assert made.activate_adapter(3)
    assert made.lora_index_to_id == [1, 3]
    assert lies_in(made.adapters, "c", 1)
    made.adapters.check_integrity()


def test_a_pinned_adapter_stays_until_it_is_removed() -> None:
    made = with_adapters(4, lru=True)
    assert isinstance(made, LRUCacheLoRAModelManager)
    assert made.pin_adapter(1)
    assert made.pin_adapter(1)
    assert not made.deactivate_adapter(1)
    for id in (2, 3):
        made.activate_adapter(id)
    assert active(made) == {1, 3}
    assert made.pin_adapter(3)
    with pytest.raises(ValueError, match="No free lora slots"):
        made.activate_adapter(4)
    assert made.remove_adapter(1)
    assert made.activate_adapter(4)
    made.remove_all_adapters()
    assert not made.remove_oldest_adapter()
    assert made.adapters.stats.pinned == 0
    made.adapters.check_integrity()


def test_the_oldest_that_is_not_pinned_is_removed() -> None:
    made = with_adapters(2, lru=True)
    assert isinstance(made, LRUCacheLoRAModelManager)
    made.pin_adapter(1)
    assert made.remove_oldest_adapter()
    assert list(made.list_adapters()) == [1]
    assert not made.remove_oldest_adapter()


def test_rows_take_the_adapters_of_the_mapping() -> None:
    made = with_adapters(3)
    with pytest.raises(StateError, match="call set_adapter_mapping first"):
        made.step_inputs()
    made.set_adapter_mapping(LoRAMapping.map_sequence_to_adapters([2, None, 1, 2]))
    step = made.step_inputs()
    assert step["lora_slot"].numpy().tolist() == [0, -1, 1, 0]
    given = weights_of("b")[A]
    assert np.array_equal(step[A].numpy()[0][:, : given.shape[1]], given)
    with pytest.raises(UnknownAdapterError, match="LoRA 9 is not registered; registered: 1, 2, 3"):
        made.set_adapter_mapping(LoRAMapping.map_sequence_to_adapters([9]))
    assert made.step_inputs()["lora_slot"].numpy().tolist() == [0, -1, 1, 0]
    made.remove_adapter(2)
    with pytest.raises(KeyError):
        made.step_inputs()
    made.adapters.check_integrity()


def test_the_manager_knows_the_modules_of_the_engine() -> None:
    made = manager()
    assert made.supported_lora_modules == ["q_proj", "v_proj"]
    assert made.packed_modules_mapping == {}
    fused = replace(FUSED_QKV, max_loras=SLOTS)
    made = LoRAModelManager(LoRAConfig(), AdapterStore(FakeExecutor(fused)))
    assert made.supported_lora_modules == ["qkv_proj"]
    assert made.packed_modules_mapping == {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def test_metrics_have_the_documents_sections_and_count() -> None:
    made = with_adapters(3)
    made.activate_adapter(1)
    made.set_adapter_mapping(LoRAMapping.map_sequence_to_adapters([1]))
    made.step_inputs()
    found, stats = made.get_lora_metrics(), made.adapters.stats
    assert found["adapters"] == {
        "registered": 3,
        "active": 1,
        "capacity": 4,
        "utilization": 0.5,
    }
    assert found["memory"] == {
        "adapter_memory_mb": stats.memory_bytes / 2**20,
        "gpu_memory_usage": stacks_of(made.adapters).nbytes / 2**20,
        "memory_efficiency": 0.5,
    }
    assert found["performance"].keys() == {
        *("avg_activation_time", "avg_switching_time", "punica_kernel_enabled"),
    }
    assert found["performance"]["avg_activation_time"] > 0
    assert found["performance"]["avg_switching_time"] > 0
    assert found["performance"]["punica_kernel_enabled"] is False
    assert manager().get_lora_metrics()["performance"]["avg_activation_time"] == 0.0


# --------------------------------------------------------------------------------------- by request


def request(folder: Path, id: int) -> LoRARequest:
    path = folder / f"{NAMES[id]}.safetensors"
    return LoRARequest(
        NAMES[id], id, str(path if path.exists() else adapter_file(folder, NAMES[id]))
    )


def worker(**options: Any) -> WorkerLoRAManager:
    return WorkerLoRAManager(manager(**options))


def test_a_request_loads_its_adapter_and_activates_it(tmp_path: Path) -> None:
    made = worker()
    assert made.add_adapter(request(tmp_path, 1))
    assert not made.add_lora(request(tmp_path, 1))
    assert made.list_adapters() == {1}
    assert made.manager.adapters.names == ("a",)
    assert active(made.manager) == {1}
    assert lies_in(made.manager.adapters, "a", 0)
    assert made.remove_lora(1)
    assert not made.remove_adapter(1)
    made.manager.adapters.check_integrity()


def test_an_adapter_of_a_request_is_read_again_after_it_was_evicted(tmp_path: Path) -> None:
    probe = slot_adapters()
    probe.load("f", adapter_file(tmp_path, "f"))
    of_rank_1 = probe.stats.memory_bytes // probe.get_coverage("f").sites[0].rank
    cache = slot_adapters(StoreConfig(host_memory=12 * of_rank_1))  # ranks 3 to 5, without rank 2
    made = WorkerLoRAManager(LRUCacheLoRAModelManager(LoRAConfig(), cache))
    for id in (1, 2, 3, 4, 1):
        made.add_adapter(request(tmp_path, id))
        slot = cache.bindings.slots[NAMES[id]]
        assert lies_in(cache, NAMES[id], slot)
    assert cache.stats.evictions_from_memory
    cache.check_integrity()


def test_a_batch_has_its_adapters_active_and_no_others(tmp_path: Path) -> None:
    made = worker(lru=True, max_cpu_loras=2)
    requests = {id: request(tmp_path, id) for id in (1, 2, 3)}
    mapping = LoRAMapping.map_sequence_to_adapters([2, 1])
    made.set_active_adapters([requests[1], requests[2]], mapping)
    assert active(made.manager) == {1, 2}
    assert sorted(made.manager.step_inputs()["lora_slot"].numpy().tolist()) == [0, 1]
    loads = made.manager.adapters.stats.reads
    made.set_active_adapters([requests[3], requests[1]], None)  # 2 makes room and 1 does not
    assert made.list_adapters() == active(made.manager) == {1, 3}
    assert made.manager.adapters.stats.reads == loads + 1
    made.set_active_adapters([], None)
    assert active(made.manager) == set()
    with pytest.raises(RuntimeError, match=r"requested models \(3\) is greater .* slots \(2\)\."):
        made.set_active_adapters(requests.values(), None)
    assert made.pin_adapter(1)
    made.remove_all_adapters()
    assert made.list_adapters() == set()
    made.manager.adapters.check_integrity()


def test_a_request_that_cannot_be_served_registers_nothing(tmp_path: Path) -> None:
    made = worker()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        made.add_adapter(LoRARequest("x", 1, str(tmp_path / "none")))
    other = LoRARequest("a", 1, str(adapter_file(tmp_path, "a")), base_model_name="org/large")
    with pytest.raises(AdapterError, match=r"base_model_name of a is 'org/large', .* from tiny"):
        made.add_adapter(other)
    save_file(make_weights(MANIFEST, rank=17), tmp_path / "large.safetensors")
    with pytest.raises(ValueError, match="rank 17"):
        made.add_adapter(LoRARequest("x", 1, str(tmp_path / "large.safetensors")))
    q = MANIFEST.sites[0].path
    tensors = {
        f"{q}.lora_A": np.ones((2, 8), np.float32),
        f"{q}.lora_B": np.ones((6, 2), np.float32),
    }
    bias = write_peft(tmp_path / "bias", tensors, target_modules=["q_proj"], lora_alpha=-1)
    with pytest.raises(ValueError, match="lora_alpha must be positive, got -1"):
        made.add_adapter(LoRARequest("x", 1, str(bias)))
    assert made.list_adapters() == set()
    assert made.manager.adapters.names == ()
    assert made.add_adapter(LoRARequest("a", 1, other.path, base_model_name="org/tiny"))
    made.manager.adapters.check_integrity()
