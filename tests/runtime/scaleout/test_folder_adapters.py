"""Adapters of a folder that several engines share, where several requests want one at a time."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fakes.slot_engine import SlotEngine, number_file

from trt_lora.plugins.errors import AdapterError, StateError, UnknownAdapterError
from trt_lora.runtime import AdapterStore
from trt_lora.runtime.scaleout.folder_adapters import FolderAdapters
from trt_lora.runtime.server.adapters.adapter_folder import AdapterFolder

NAME = "1.safetensors"


@pytest.fixture
def store() -> Iterator[AdapterStore]:
    adapters = AdapterStore(SlotEngine(2))
    yield adapters
    adapters.check_integrity()
    adapters.close()


def of(store: AdapterStore, folder: Path) -> FolderAdapters:
    """Adapters of a folder that has one."""
    folder.mkdir(exist_ok=True)
    number_file(folder, 1)
    return FolderAdapters(store, AdapterFolder(folder, roots=()), ["base"])


async def use(adapters: FolderAdapters, name: str = NAME) -> None:
    """Use an adapter for a moment."""
    async with adapters.using(name):
        await asyncio.sleep(0)


def test_an_adapter_is_read_once_for_all_who_ask_for_it(
    store: AdapterStore, tmp_path: Path
) -> None:
    adapters = of(store, tmp_path / "folder")

    async def ask() -> None:
        await asyncio.gather(*(use(adapters) for _ in range(8)))

    asyncio.run(ask())
    assert store.stats.reads == 1
    assert store.info(NAME).version == 1


def test_it_is_unloaded_with_its_last_user_even_one_that_fails(
    store: AdapterStore, tmp_path: Path
) -> None:
    adapters = of(store, tmp_path / "folder")

    async def leave() -> None:
        async with adapters.using(NAME):
            adapters.unload(NAME)
            assert NAME in store.names
            raise StateError("a request has failed")

    async def fail() -> None:
        with pytest.raises(StateError):
            await leave()
        assert NAME not in store.names
        await use(adapters)  # a front end did not know yet
        assert NAME in store.names

    asyncio.run(fail())


def test_a_folder_that_cannot_be_read_takes_nothing_away(
    store: AdapterStore, tmp_path: Path
) -> None:
    adapters = of(store, tmp_path / "folder")

    async def ask() -> None:
        await use(adapters)
        shutil.rmtree(tmp_path / "folder")
        await use(adapters)
        with pytest.raises(AdapterError, match="--lora-dir cannot be read: No such file"):
            await use(adapters, "2.safetensors")

    asyncio.run(ask())


def test_without_a_folder_there_is_no_adapter(store: AdapterStore) -> None:
    adapters = FolderAdapters(store, None, ["base"])
    with pytest.raises(UnknownAdapterError, match="there is no --lora-dir"):
        asyncio.run(use(adapters))
