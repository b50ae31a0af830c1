"""Blends and strengths: entries made of versions, wherever the engine has its adapters."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.fakes.adapter_files import MANIFEST, NBYTES, A, adapter_files
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights

from trt_lora.plugins.errors import AdapterError, LoRAError, StateError, UnknownAdapterError
from trt_lora.runtime import load_adapter
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.store import AdapterStore

B = A.replace("lora_A", "lora_B")
MANIFESTS = {"buffers": make_manifest(), "slots": MANIFEST}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return adapter_files(tmp_path, "abc")


@pytest.fixture(params=MANIFESTS)
def store(request: pytest.FixtureRequest) -> Iterator[AdapterStore]:
    made = AdapterStore(FakeExecutor(MANIFESTS[request.param]))
    yield made
    made.close()
    made.check_integrity()


def delta(store: AdapterStore, name: str) -> Array:
    """What a row with an adapter adds at the first site: A @ B, in float64."""
    bound = store.bindings.rows([name])
    a, b = (bound[factor].numpy().astype(np.float64) for factor in (A, B))
    return np.asarray(a @ b).reshape(8, 6)


def product(path: Path) -> Array:
    weights = load_file(path)
    return np.asarray(weights[A].astype(np.float64) @ weights[B].astype(np.float64))


def near(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_blend_is_the_weighted_sum_and_is_made_when_it_is_wanted(
    store: AdapterStore, files: dict[str, Path]
) -> None:
    for name in "ab":
        store.register(name, files[name])
    coverage = store.blend("both", {"a": 0.7, "b": -0.5})
    assert {site.rank for site in coverage.sites} == {8}
    assert (store.stats.reads, store.info("both").is_loaded) == (0, False)
    assert store.names == ("a", "b", "both")
    near(delta(store, "both"), 0.7 * product(files["a"]) - 0.5 * product(files["b"]))
    assert store.info("both").is_resident
    assert store.stats.reads == 3


def test_a_strength_is_a_name_with_a_number_behind_it(
    store: AdapterStore, files: dict[str, Path]
) -> None:
    store.load("a", files["a"])
    for scale in ("0.5", "-2", "+1e-1", "3.", "0"):
        near(delta(store, f"a@{scale}"), float(scale) * product(files["a"]))
    near(delta(store, "a@1.0"), product(files["a"]))
    assert store.names == ("a",)
    assert store.info("a@0.5").version == store.info("a").version
    assert store.info("a@0.5").content_hash != store.info("a").content_hash
    for name in ("b@0.5", "a@", "a@x", "a@1.2.3", "a@nan"):
        with pytest.raises(UnknownAdapterError, match="unknown adapter"):
            store.lease(name)


def test_a_strength_of_a_blend_and_a_blend_of_blends(
    store: AdapterStore, files: dict[str, Path]
) -> None:
    for name in "abc":
        store.register(name, files[name])
    a, b, c = (product(files[name]) for name in "abc")
    store.blend("ab", {"a": 1, "b@0.5": 2})
    store.blend("all", {"ab": 3, "c": 1})
    near(delta(store, "ab@0.25"), 0.25 * (a + b))
    near(delta(store, "all"), 3 * (a + b) + c)


@pytest.mark.parametrize("how", ["unload", "replace"])
def test_what_is_made_of_an_adapter_is_gone_with_it(
    store: AdapterStore, files: dict[str, Path], how: str
) -> None:
    for name in "abc":
        store.load(name, files[name])
    store.blend("ab", {"a": 1, "b": 1})
    store.blend("abc", {"ab": 1, "c": 1})
    store.pin("ab")
    lease = store.lease("b@0.5")
    if how == "unload":
        store.unload("b")
    else:
        store.load("b", files["c"], replace=True)
    assert store.names == (("a", "c") if how == "unload" else ("a", "b", "c"))
    for name, part in (("ab", "b"), ("abc", "ab")):
        with pytest.raises(UnknownAdapterError, match=f"{name!r} was made of {part!r}, which was"):
            store.info(name)
    store.check_integrity()
    bound = store.bindings.rows([lease])  # who has it keeps it
    near(np.asarray(bound[A].numpy() @ bound[B].numpy()).reshape(8, 6), delta_of(lease))
    store.release(lease)
    if how == "replace":
        near(delta(store, "b@0.5"), 0.5 * product(files["c"]))
    store.add("ab", load_adapter(files["a"]))  # the name is free
    near(delta(store, "ab"), product(files["a"]))


def delta_of(lease: object) -> Array:
    tensors = lease.loaded.fitted.tensors  # type: ignore[attr-defined]
    return np.asarray(tensors[A].numpy() @ tensors[B].numpy())


def test_an_evicted_blend_is_made_again(files: dict[str, Path]) -> None:
    config = StoreConfig(device_memory=6 * NBYTES)
    store = AdapterStore(FakeExecutor(MANIFESTS["buffers"]), config)
    for name in "abc":
        store.register(name, files[name])
    store.blend("ab", {"a": 1, "b": 1})
    first = delta(store, "ab")
    assert store.stats.memory_bytes == 4 * NBYTES
    for scale in (1, 2, 3, 4):
        store.bindings.activate(f"c@{scale}")
    assert [store.info(name).is_loaded for name in ("a", "b", "ab")] == [False, False, True]
    store.bindings.activate("c@5")
    assert not store.info("ab").is_loaded
    np.testing.assert_array_equal(delta(store, "ab"), first)
    store.check_integrity()


def test_a_blend_that_cannot_be_had_is_refused_and_changes_nothing(
    store: AdapterStore, files: dict[str, Path], tmp_path: Path
) -> None:
    save_file(make_weights(make_manifest(), rank=13), tmp_path / "wide.safetensors")
    for name, path in {**files, "wide": tmp_path / "wide.safetensors"}.items():
        store.load(name, path)
    before = store.names
    refused: list[tuple[type[LoRAError], str, dict[str, float]]] = [
        (AdapterError, "rank 17; this engine takes 1 to 16", {"a": 1, "wide": 1}),
        (AdapterError, "has no parts", {}),
        (AdapterError, "is one of them", {"x": 1, "a": 1}),
        (AdapterError, "a scale is nan", {"a": float("nan")}),
        (UnknownAdapterError, "unknown adapter 'd'", {"a": 1, "d": 1}),
    ]
    for error, message, parts in refused:
        with pytest.raises(error, match=message):
            store.blend("x", parts)
    with pytest.raises(AdapterError, match="'a' is loaded already"):
        store.blend("a", {"b": 1})
    with pytest.raises(AdapterError, match="beyond the range of float32"):
        store.blend("x", {"a": 1e39}, at_once=True)
    assert store.names == before
    store.blend("x", {"a": 1e39})
    with pytest.raises(AdapterError, match="beyond the range of float32"):
        store.lease("x")


def test_a_name_that_means_a_strength_is_no_name(
    store: AdapterStore, files: dict[str, Path]
) -> None:
    with pytest.raises(AdapterError, match=r"'a@0.5' means the adapter 'a' at strength 0.5; choos"):
        store.load("a@0.5", files["a"])
    store.load("org/a@main", files["a"])
    near(delta(store, "org/a@main@2"), 2 * product(files["a"]))


def test_parts_that_cannot_be_read_again_take_along_what_is_made_of_them(
    files: dict[str, Path],
) -> None:
    config = StoreConfig(device_memory=2 * NBYTES)
    store = AdapterStore(FakeExecutor(MANIFESTS["buffers"]), config)
    store.add("a", load_adapter(files["a"]))
    store.blend("half", {"a": 0.5})
    for name in "bc":
        store.load(name, files[name])
    assert store.names == ("b", "c")
    with pytest.raises(UnknownAdapterError, match="'half' was made of 'a'"):
        store.lease("half")
    store.check_integrity()


@pytest.mark.parametrize("part", ["ab", "a@0.5"])
def test_a_blend_of_what_is_made_of_the_one_it_would_replace_is_refused(
    store: AdapterStore, files: dict[str, Path], part: str
) -> None:
    for name in "ab":
        store.load(name, files[name])
    store.blend("ab", {"a": 1, "b": 1})
    with pytest.raises(
        AdapterError, match=r"would replace what .* made of, and they would be lost"
    ):
        store.blend("a", {part: 1, "b": 1}, replace=True)
    assert store.names == ("a", "b", "ab")
    store.check_integrity()


def test_a_part_that_is_replaced_while_its_blend_is_made_is_refused(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AdapterStore(FakeExecutor(MANIFESTS["buffers"]))
    store.load("a", files["a"])
    from trt_lora.runtime.store.blend_source import BlendSource

    preview = BlendSource.preview

    def meanwhile(source: BlendSource) -> object:
        store.load("a", files["b"], replace=True)
        return preview(source)

    monkeypatch.setattr(BlendSource, "preview", meanwhile)
    with pytest.raises(StateError, match=r"blend 'x': \['a'\] were unloaded or replaced"):
        store.blend("x", {"a": 1})
    assert store.names == ("a",)
    store.check_integrity()
