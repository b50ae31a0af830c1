"""LoRAManager: what it refuses, and that a refusal changes nothing."""

import copy
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.adapters.manager_setup import MANIFEST, A, B, manager_with, pair, state_of
from support.fakes.fake_engine import FakeExecutorWithMemory

from trt_lora.plugins.errors import AdapterError, TensorError
from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.runtime.memory.tensor import Tensor


def half() -> dict[str, object]:
    return {name: array.astype(np.float16) for name, array in pair().items()}


def on_another_gpu() -> dict[str, object]:
    return {n: Tensor(256, array.shape, "float32", "cuda:0") for n, array in pair().items()}


@pytest.mark.parametrize(
    ("name", "weights", "error", "message"),
    [
        ("", pair(), AdapterError, "needs a name"),
        ("a", pair(), AdapterError, "'a' is loaded already"),
        ("new", {}, AdapterError, "'new' has no weights"),
        ("new", {A: pair()[A]}, AdapterError, f"{B} is missing"),
        ("new", {**pair(), B: pair(rank=3)[B]}, AdapterError, "rank 2 but .* has rank 3"),
        (
            "new",
            {**pair(), "lora_A_lm_head": pair()[A]},
            AdapterError,
            "module lm_head has no site",
        ),
        ("new", {**pair(), "x": pair()[A]}, AdapterError, "'x' is no binding of this engine"),
        ("new", half(), AdapterError, "is float16, this engine takes float32; convert"),
        ("new", {**pair(), A: pair()[B].T}, TensorError, "row-major"),
        ("new", {**pair(), A: np.ones((8, 2))}, TensorError, "float64"),
        ("new", {**pair(), A: None}, TensorError, "NoneType"),
        ("new", on_another_gpu(), TensorError, "is on cuda:0, but this engine runs on the cpu"),
    ],
)
def test_weights_that_cannot_be_added_leave_the_manager_as_it_was(
    name: str, weights: dict[str, object], error: type[Exception], message: str
) -> None:
    manager = manager_with(a=pair())
    manager.switch_weights("a")
    before = state_of(manager)
    with pytest.raises(error, match=message):
        manager.add_weights(name, weights)
    assert state_of(manager) == before
    manager.add_weights("new", pair())
    assert manager.get_adapter_names() == ["a", "new"]


@pytest.mark.parametrize("weight", [None, np.ones((8, 2)), pair()[B].T])
def test_the_binding_of_a_weight_that_is_no_usable_tensor_is_named(weight: object) -> None:
    with pytest.raises(TensorError, match=A):
        LoRAManager().add_weights("a", {A: weight, B: pair()[B]})


def missing(folder: Path) -> Path:
    return folder / "nowhere"


def truncated(folder: Path) -> Path:
    save_file(pair(), folder / "whole.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "whole.safetensors").read_bytes()[:-4])
    return folder / "cut.safetensors"


def too_wide(folder: Path) -> Path:
    save_file(pair(rank=17), folder / "wide.safetensors")
    return folder / "wide.safetensors"


def diverged(folder: Path) -> Path:
    save_file(pair(value=float("nan")), folder / "nan.safetensors")
    return folder / "nan.safetensors"


@pytest.mark.parametrize("make", [missing, truncated, too_wide, diverged])
def test_a_load_that_fails_leaves_the_manager_as_it_was(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    manager = manager_with(a=pair())
    manager.switch_weights("a")
    before = state_of(manager)
    with pytest.raises(AdapterError):
        manager.load_weights("new", make(tmp_path))
    assert state_of(manager) == before
    manager.add_weights("new", pair())


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "needs a name"), ("a", "'a' is loaded already; .*, or pass replace=True")],
)
def test_a_load_under_a_taken_or_empty_name_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    save_file(pair(value=2), tmp_path / "a.safetensors")
    manager = manager_with(a=pair())
    before = state_of(manager)
    with pytest.raises(AdapterError, match=message):
        manager.load_weights(name, tmp_path / "a.safetensors")
    assert state_of(manager) == before


def test_memory_that_refuses_the_upload_leaves_the_manager_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, manager = FakeExecutorWithMemory(MANIFEST), LoRAManager()
    manager.initialize_engine_bindings(executor)
    before = state_of(manager)

    def fail(tensors: Mapping[str, Tensor], stream: object = None) -> dict[str, Tensor]:
        raise MemoryError

    monkeypatch.setattr(executor.memory, "upload", fail)
    with pytest.raises(MemoryError):
        manager.add_weights("a", pair())
    assert state_of(manager) == before


# ------------------------------------------------------------------------------------- copying


PICKLES = [partial(pickle.dumps, protocol=n) for n in range(pickle.HIGHEST_PROTOCOL + 1)]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, *PICKLES])
def test_a_manager_cannot_be_duplicated(duplicate: Callable[[object], object]) -> None:
    manager = manager_with(a=pair())
    with pytest.raises(TypeError, match="cannot be copied; pass the object itself"):
        duplicate(manager)
