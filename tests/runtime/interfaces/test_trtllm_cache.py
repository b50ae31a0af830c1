"""TensorRT-LLM's requests: the first brings weights, later ones the id, an evicted id says so."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.adapters.many_adapters import MANIFEST, SLOTS, A, adapter_file, lies_in, slot_adapters
from support.adapters.trtllm_files import delta, factors, rows_of
from support.fakes.adapter_files import stacks_of

from trt_lora.plugins.errors import AdapterError, ConfigError, StateError, TensorError
from trt_lora.runtime.interfaces.trtllm import (
    LoraCacheOptions,
    PeftCacheManager,
    PeftTaskNotCachedError,
    TrtllmLoraRequest,
)
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.store.entry import Lease

K, N = 8, 6  # of every site
Q, V = 1, 3  # TensorRT-LLM's ids of attn_q and attn_v


def arrays(seed: int, rank: int = 2) -> tuple[Array, Array]:
    """lora_weights and lora_config of q and v in layer 0, and of q in layer 1."""
    pairs = [factors(r, K, N, seed + i) for i, r in enumerate((rank, 3, rank))]
    config = [[Q, 0, rank], [V, 0, 3], [Q, 1, rank]]
    return rows_of(pairs), np.array(config, np.int32)


def first(task_id: int, seed: int | None = None, **options: Any) -> TrtllmLoraRequest:
    return TrtllmLoraRequest(task_id, *arrays(task_id if seed is None else seed, **options))


def cache(**options: Any) -> PeftCacheManager:
    config = LoraCacheOptions(**options).store_config(MANIFEST)
    return PeftCacheManager(slot_adapters(config))


def delta_in_slot(of: PeftCacheManager, slot: int) -> Array:
    """[k, n] of q in layer 0."""
    stacks = stacks_of(of.adapters).views(slot, 1)
    b = stacks[A.replace("lora_A", "lora_B")].numpy()[0].astype(np.float64)
    found: Array = stacks[A].numpy()[0] @ b
    return found


def slot_of(tasks: PeftCacheManager, lease: Lease) -> int:
    slot = tasks.adapters.bindings.activate(lease)
    assert slot is not None
    return slot


def test_the_first_request_brings_the_weights_and_later_ones_the_id() -> None:
    tasks = cache()
    for request in (first(7), TrtllmLoraRequest(7), first(7)):
        lease = tasks.add_request_peft(request)
        assert lease is not None
        assert np.array_equal(
            delta_in_slot(tasks, slot_of(tasks, lease)),
            delta(*factors(2, K, N, 7)),
        )
        tasks.mark_request_done(lease)
    assert tasks.adapters.stats.registered == 1
    assert tasks.is_task_cached(7)
    assert tasks.is_task_cached_device(7)
    tasks.adapters.check_integrity()


def test_a_task_that_waits_for_a_slot_is_a_name_and_no_lease() -> None:
    tasks = cache()
    names = [tasks.take_in(first(number)) for number in range(SLOTS + 1)]
    assert len({*names}) == SLOTS + 1, "more than there are slots"
    assert tasks.take_in(TrtllmLoraRequest(0)) == names[0]
    assert tasks.adapters.stats.leased == 0
    assert tasks.take_in(TrtllmLoraRequest()) is None
    with pytest.raises(PeftTaskNotCachedError, match="LoRA task 9 not found in cache"):
        tasks.take_in(TrtllmLoraRequest(9))


def test_a_request_without_a_task_is_the_base_models() -> None:
    tasks = cache()
    lease = tasks.add_request_peft(TrtllmLoraRequest())
    assert lease is None
    tasks.mark_request_done(lease)
    assert tasks.adapters.names == ()


def test_an_id_that_was_never_sent_says_what_to_send() -> None:
    expected = r"^LoRA task 0 not found in cache. Please send LoRA weights with request$"
    with pytest.raises(PeftTaskNotCachedError, match=expected):
        cache().add_request_peft(TrtllmLoraRequest(0))


def test_the_oldest_task_leaves_a_full_cache_and_comes_back_with_its_weights() -> None:
    one = cache()
    one.mark_request_done(one.add_request_peft(first(0)))
    room = 2 * one.adapters.stats.memory_bytes
    tasks = cache(lora_cache_host_memory_bytes=room)
    for task_id in range(SLOTS + 1):
        tasks.mark_request_done(tasks.add_request_peft(first(task_id)))
    assert [tasks.is_task_cached(task_id) for task_id in range(3)] == [False, True, True]
    with pytest.raises(KeyError, match="LoRA task 0 not found in cache"):
        tasks.add_request_peft(TrtllmLoraRequest(0))
    tasks.mark_request_done(tasks.add_request_peft(first(0)))
    tasks.mark_request_done(tasks.add_request_peft(TrtllmLoraRequest(0)))
    tasks.adapters.check_integrity()


def test_a_task_under_way_does_not_leave() -> None:
    tasks = cache()
    leases = [tasks.add_request_peft(first(task_id)) for task_id in range(SLOTS)]
    with pytest.raises(StateError, match="slots"):
        tasks.add_request_peft(first(9))
    for lease in leases:
        tasks.mark_request_done(lease)
    tasks.mark_request_done(tasks.add_request_peft(first(9)))
    with pytest.raises(StateError, match="released already"):
        tasks.mark_request_done(leases[0])
    tasks.adapters.check_integrity()


def test_other_weights_under_a_cached_id_are_refused() -> None:
    tasks = cache()
    lease = tasks.add_request_peft(first(7))
    assert lease is not None
    with pytest.raises(AdapterError, match=r"LoRA task 7 is cached with other weights; .*another"):
        tasks.add_request_peft(first(7, seed=8))
    assert np.array_equal(delta_in_slot(tasks, slot_of(tasks, lease)), delta(*factors(2, K, N, 7)))


def test_the_callers_arrays_may_change_afterwards() -> None:
    tasks, (weights, config) = cache(), arrays(7)
    lease = tasks.add_request_peft(TrtllmLoraRequest(7, weights, config))
    assert lease is not None
    weights[:] = 0
    slot = slot_of(tasks, lease)
    assert np.array_equal(delta_in_slot(tasks, slot), delta(*factors(2, K, N, 7)))


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "V2", ">f4", "batched"])
def test_weights_come_in_the_dtypes_and_shapes_of_the_format(kind: str) -> None:
    weights, config = arrays(7)
    if kind == "batched":
        weights, config = weights[None], config[None]
    elif kind == "V2":
        weights = weights.astype(ml_dtypes.bfloat16).view("V2")
    else:
        weights = weights.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    tasks = cache()
    lease = tasks.add_request_peft(TrtllmLoraRequest(7, weights, config))
    assert lease is not None
    slot = slot_of(tasks, lease)
    assert np.array_equal(delta_in_slot(tasks, slot), delta(*factors(2, K, N, 7)))


def test_weights_that_are_no_tensor_are_refused() -> None:
    tasks = cache()
    with pytest.raises(TensorError):
        tasks.add_request_peft(TrtllmLoraRequest(8, [[1.0]], arrays(7)[1]))
    tasks.adapters.check_integrity()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, *arrays(0)), "^lora_task_id must be set for LoRA inference$"),
        ((7, arrays(0)[0], None), "lora_config is missing: lora_weights and lora_config come"),
        ((7, None, arrays(0)[1]), "lora_weights is missing"),
        ((-1,), "lora_task_id is -1, expected a whole number from 0 to 18446744073709551615"),
        ((1 << 64,), "expected a whole number"),
        (("7",), "lora_task_id is '7'"),
        ((True,), "lora_task_id is True"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        TrtllmLoraRequest(*arguments)


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (arrays(0)[0], arrays(0)[1].astype(np.int64), "config.npy holds int64, expected int32"),
        (arrays(0)[0].astype(np.float64), arrays(0)[1], "holds float64, expected float32 or"),
        (arrays(0)[0][:2], arrays(0)[1], "3 rows of config, 2 of weights"),
        (
            arrays(0)[0],
            arrays(0)[1] + np.array([0, 9, 0], np.int32),
            "layer 9, for which the engine",
        ),
        (arrays(0)[0], arrays(0)[1] + np.array([1, 0, 0], np.int32), "is attn_k of layer 0"),
        (arrays(0, rank=17)[0], arrays(0, rank=17)[1], "rank 17"),
    ],
    ids=["int64", "float64", "rows", "layer", "module", "rank"],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_cached(
    weights: Array, config: Array, message: str
) -> None:
    tasks = cache()
    with pytest.raises(AdapterError, match=message):
        tasks.add_request_peft(TrtllmLoraRequest(7, weights, config))
    assert not tasks.is_task_cached(7)
    tasks.adapters.check_integrity()


def test_an_option_of_the_cache_holds_or_is_refused() -> None:
    every = cache(
        lora_cache_optimal_adapter_size=8,
        lora_cache_max_adapter_size=16,
        lora_cache_gpu_memory_fraction=1.0,
        lora_cache_host_memory_bytes=12_345,
    )
    assert every.adapters.stats.memory_limit == 12_345
    assert cache().adapters.stats.memory_limit == 1 << 30
    assert cache(lora_cache_host_memory_bytes=None).adapters.stats.memory_limit is None
    share = LoraCacheOptions(lora_cache_gpu_memory_fraction=1).store_config(MANIFEST)
    assert isinstance(share.device_memory, float)
    for options, message in (
        ({"lora_cache_max_adapter_size": 64}, "lora_cache_max_adapter_size is 64, this engine"),
        ({"lora_cache_optimal_adapter_size": 4}, "lora_cache_optimal_adapter_size is 4, this"),
        ({"lora_cache_gpu_memory_fraction": 1.5}, "lora_cache_gpu_memory_fraction is 1.5"),
        ({"lora_cache_host_memory_bytes": 0}, "lora_cache_host_memory_bytes is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            cache(**options)


def test_a_task_is_nobody_elses_adapter_whatever_that_is_called(tmp_path: Path) -> None:
    tasks = cache()
    tasks.adapters.load("task 5", adapter_file(tmp_path, "a"))
    assert not tasks.is_task_cached(5)
    with pytest.raises(PeftTaskNotCachedError, match="LoRA task 5 not found in cache"):
        tasks.add_request_peft(TrtllmLoraRequest(5))
    lease = tasks.add_request_peft(first(5))
    assert lease is not None
    assert lease.name != "task 5"
    assert "task 5" in tasks.adapters.names
    tasks.mark_request_done(lease)
    other = PeftCacheManager(tasks.adapters)
    assert not other.is_task_cached(5)


def test_the_tasks_of_prompts_are_names_and_minus_one_is_the_base_model(tmp_path: Path) -> None:
    tasks = cache()
    for task_id, name in enumerate("ab"):
        tasks.load_task(task_id, adapter_file(tmp_path, name))
    names = tasks.adapter_names([-1, 0, 1, 0])
    assert names[0] is None
    assert names[1] == names[3] != names[2]
    step = tasks.adapters.bindings.rows(names)
    assert step["lora_slot"].numpy().tolist() == [-1, 0, 1, 0]
    assert lies_in(tasks.adapters, "a", 0)
    assert lies_in(tasks.adapters, "b", 1)
    tasks.load_task(0, adapter_file(tmp_path, "c"))
    tasks.adapters.bindings.rows(tasks.adapter_names([0]))
    assert lies_in(tasks.adapters, "c", 0)
    with pytest.raises(KeyError, match="LoRA task 2 not found in cache"):
        tasks.adapter_names([0, 2])
    for wrong in (-2, 1 << 64, "0", True):
        with pytest.raises(AdapterError, match=r"a LoRA task is .*, expected a whole number"):
            tasks.adapter_names([wrong])  # type: ignore[list-item]


def test_what_are_no_adapters_of_an_engine_is_refused() -> None:
    theirs: Any = PeftCacheManager
    with pytest.raises(ConfigError, match=r"adapters is None .*, expected AdapterStore"):
        theirs(None)
