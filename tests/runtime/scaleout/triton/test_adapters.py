"""Adapters of Triton's model: a folder that is looked at when a name is asked, and tasks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters.many_adapters import MANIFEST, adapter_file, slot_adapters
from support.adapters.trtllm_files import factors, rows_of

from trt_lora.plugins.errors import AdapterError, StateError, UnknownAdapterError
from trt_lora.runtime.interfaces.trtllm import LoraCacheOptions, TrtllmLoraRequest
from trt_lora.runtime.scaleout.triton.asked import Asked
from trt_lora.runtime.scaleout.triton.asked_adapters import AskedAdapters
from trt_lora.runtime.server.errors import HttpError
from trt_lora.runtime.store.store import AdapterStore

NONE = TrtllmLoraRequest()


def named(name: str | None) -> Asked:
    return Asked([5], {}, name, NONE, streams=False, prepends=False)


def task(number: int, seed: int | None = None) -> Asked:
    """With weights where a seed is given."""
    arrays: tuple[Any, ...] = ()
    if seed is not None:
        arrays = (rows_of([factors(2, 8, 6, seed)]), np.array([[1, 0, 2]], np.int32))
    request = TrtllmLoraRequest(number, *arrays)
    return Asked([5], {}, None, request, streams=False, prepends=False)


@pytest.fixture
def store() -> AdapterStore:
    return slot_adapters(LoraCacheOptions().store_config(MANIFEST))


@pytest.fixture
def adapters(store: AdapterStore, tmp_path: Path) -> AskedAdapters:
    return AskedAdapters(store, str(tmp_path))


def test_a_name_is_looked_for_when_it_is_asked_and_its_files_are_followed(
    adapters: AskedAdapters, store: AdapterStore, tmp_path: Path
) -> None:
    adapters.name(named("a.safetensors"))
    assert not store.names, "the store says that it is unknown, when it is submitted"
    path = adapter_file(tmp_path, "a")
    assert adapters.name(named("a.safetensors")) == "a.safetensors"
    first = store.info("a.safetensors").version
    adapters.name(named("a.safetensors"))
    assert store.info("a.safetensors").version == first, "the same files are registered once"
    adapter_file(tmp_path, "b").rename(path)
    adapters.name(named("a.safetensors"))
    assert store.info("a.safetensors").version > first
    path.unlink()
    adapters.name(named("a.safetensors"))
    assert not store.names


def test_a_strength_follows_its_adapter(
    adapters: AskedAdapters, store: AdapterStore, tmp_path: Path
) -> None:
    adapter_file(tmp_path, "a")
    name = adapters.name(named("a.safetensors@0.5"))
    assert name == "a.safetensors@0.5"
    assert store.info(name)


def test_what_is_not_whole_is_refused_and_what_was_there_is_no_answer(
    adapters: AskedAdapters, store: AdapterStore, tmp_path: Path
) -> None:
    (tmp_path / "half").mkdir()
    with pytest.raises(AdapterError, match="adapter 'half' holds no adapter, or not yet"):
        adapters.name(named("half"))
    path = adapter_file(tmp_path, "a")
    adapters.name(named("a.safetensors"))
    path.write_bytes(b"no safetensors")
    for _ in range(2):
        with pytest.raises(AdapterError):
            adapters.name(named("a.safetensors"))


@pytest.mark.parametrize("name", ["a,b", "a\\b", "..", "a/../b", "a\n"])
def test_what_cannot_be_a_name_is_refused(adapters: AskedAdapters, name: str) -> None:
    with pytest.raises(HttpError, match="characters that a name cannot have"):
        adapters.name(named(name))


def test_without_a_folder_and_without_a_name(store: AdapterStore) -> None:
    adapters = AskedAdapters(store, "")
    assert adapters.name(named("a")) == "a"
    assert adapters.name(named(None)) is None


def test_a_task_brings_its_weights_and_is_its_id_from_then_on(
    adapters: AskedAdapters, store: AdapterStore
) -> None:
    with pytest.raises(UnknownAdapterError, match="LoRA task 5 not found in cache"):
        adapters.name(task(5))
    name = adapters.name(task(5, seed=1))
    assert name in store.names
    assert adapters.name(task(5)) == adapters.name(task(5, seed=1)) == name
    with pytest.raises(AdapterError, match="LoRA task 5 is cached with other weights"):
        adapters.name(task(5, seed=2))


def test_a_task_that_is_evicted_while_it_waits_is_told_the_same(adapters: AskedAdapters) -> None:
    evicted = UnknownAdapterError("adapter 'peft-1 task 5' was evicted")
    assert "LoRA task 5 not found in cache" in str(adapters.told(task(5), evicted))
    assert adapters.told(named("a"), evicted) is evicted
    other = StateError("no room")
    assert adapters.told(task(5), other) is other
