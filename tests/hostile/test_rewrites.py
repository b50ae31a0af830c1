"""Adapters that change while they are loaded: all of one version, or refused."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hostile.stress_rewrites import run
from safetensors.numpy import save_file
from support.fakes.fake_engine import write_peft

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.formats import peft as peft_format
from trt_lora.runtime.adapters.formats.peft import WEIGHTS_FILE
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE, read_peft_config
from trt_lora.runtime.adapters.formats.peft_targets import targeting_of
from trt_lora.runtime.adapters.load import load_adapter


def test_what_another_process_rewrites_all_the_time_is_loaded_whole_or_refused() -> None:
    assert run(3) > 0


def version(folder: Path, value: float) -> Path:
    """An adapter whose weights are all `value`, and so is its scale."""
    shapes = {"A": (2, 8), "B": (6, 2)}
    tensors = {f"q.lora_{f}": np.full(shape, value, np.float32) for f, shape in shapes.items()}
    return write_peft(folder, tensors, lora_alpha=2 * value)


def after_the_config(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Let `change` happen between config and weights."""

    def read(directory: Path) -> Any:
        config = read_peft_config(directory)
        change()
        return config

    monkeypatch.setattr(peft_format, "read_peft_config", read)


def linked(folder: Path, monkeypatch: pytest.MonkeyPatch, remove_old: bool) -> Path:
    """An adapter behind a link that leads to a new version between config and weights.

    When all is read, the link leads to the old version again, unless that was removed.
    """
    old, new, link = version(folder / "old", 1), version(folder / "new", 3), folder / "adapter"
    link.symlink_to(old)

    def lead_to(target: Path) -> None:
        (folder / "link").symlink_to(target)
        (folder / "link").replace(link)

    def replace() -> None:
        lead_to(new)
        if remove_old and old.exists():
            shutil.rmtree(old)

    def load_and_lead_back(*arguments: Any) -> Any:
        if not remove_old:
            lead_to(old)
        return targeting_of(*arguments)

    after_the_config(monkeypatch, replace)
    monkeypatch.setattr(peft_format, "targeting_of", load_and_lead_back)
    return link


@pytest.mark.parametrize(("remove_old", "expected"), [(False, 1), (True, 3)])
def test_an_adapter_behind_a_link_that_is_exchanged_is_of_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove_old: bool, expected: int
) -> None:
    adapter = load_adapter(linked(tmp_path, monkeypatch, remove_old))
    assert adapter.weights["lora_B_q"].scale == expected
    for weight in adapter.weights.values():
        np.testing.assert_array_equal(weight.read(), expected)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_an_adapter_whose_files_are_replaced_all_the_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory, other = version(tmp_path / "a", 1), version(tmp_path / "b", 3)

    def replace() -> None:
        (tmp_path / name).write_bytes((other / name).read_bytes())
        os.replace(tmp_path / name, directory / name)

    after_the_config(monkeypatch, replace)
    with pytest.raises(AdapterError, match="a was replaced or changed while it was read"):
        load_adapter(directory)


def test_other_files_of_the_directory_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = version(tmp_path / "a", 1)
    after_the_config(monkeypatch, (directory / "log.txt").touch)
    assert load_adapter(directory).weights


def test_a_file_that_is_cut_while_its_header_is_checked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, check = tmp_path / "a.safetensors", safetensors.safe_open
    save_file({"lora_A_q": np.ones((8, 2), np.float32)}, path)

    def cut(checked: object, framework: str) -> Any:
        os.truncate(path, 10)
        return check(checked, framework)

    monkeypatch.setattr(safetensors, "safe_open", cut)
    with pytest.raises(AdapterError, match="was changed while it was read"):
        load_adapter(path).in_memory()


def test_an_adapter_in_one_file_may_be_replaced_all_the_time(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for value in range(20):
        save_file({"lora_A_q": np.full((8, 2), value, np.float32)}, path)
        adapter = load_adapter(path)
        save_file({"lora_A_q": np.zeros((8, 2), np.float32)}, tmp_path / "new")
        (tmp_path / "new").replace(path)
        np.testing.assert_array_equal(adapter.weights["lora_A_q"].read(), value)
