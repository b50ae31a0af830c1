"""Other strengths of a blend are written over its own: its memory, the bits of one made anew."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from support.eventually import eventually
from support.fakes.fake_engine import FakeExecutor, make_manifest, make_weights

from trt_lora.plugins.contract.sites import Site
from trt_lora.plugins.errors import AdapterError, BackendError, UnknownAdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.blend import Strength
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.memory import host
from trt_lora.runtime.memory.device import CudaMemory
from trt_lora.runtime.memory.dtypes import Array, storage_dtype
from trt_lora.runtime.memory.tensor import tensor_from_storage
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore

RANK = 3  # of each part
LAST = "model.layers.1.mlp.experts"
SCALES: tuple[dict[str, Strength], ...] = (
    {"a": 0.7, "b": -0.3},
    {"a": {"model.layers.0": 0.1, LAST: 0.0}, "b": 1.7},
    {"a": 0.0, "b": 0.0},
    {"a": 1.0, "b": 1.0},
)


def store_of(dtype: str, slots: int = 0, memory: CudaMemory | None = None) -> AdapterStore:
    """A store of "a" and "b", with experts at their last site."""
    sites = (*make_manifest(dtype=dtype).sites, Site(LAST, 8, 6, dtype, experts=2))
    manifest = replace(make_manifest(dtype=dtype), sites=sites, max_loras=slots)
    executor = FakeExecutor(manifest, memory)
    executor.rank_multiple = 8
    store = AdapterStore(executor)
    for seed, name in enumerate("ab"):
        weights = {
            binding: weight_of(binding, tensor_from_storage(values.astype(storage), dtype))
            for storage in (storage_dtype(dtype),)
            for binding, values in make_weights(manifest, rank=RANK, seed=seed).items()
        }
        store.add(name, Adapter(name, weights))
    return store


@pytest.fixture(params=["host", "host slots", "gpu", "gpu slots"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[str], AdapterStore]]:
    """What makes a store of each kind."""
    memory, slots = None, 2 if "slots" in request.param else 0
    if "gpu" in request.param:
        request.getfixturevalue("cuda")
        memory = CudaMemory()
    yield lambda dtype: store_of(dtype, slots, memory)
    gc.collect()
    if memory is not None:
        memory.close()


def bits(store: AdapterStore, name: Lease | str) -> dict[str, Array]:
    """What a step binds for a row with an adapter, by binding, with all of the engine's padding."""
    bound = store.bindings.rows([name])
    row = (int(bound["lora_slot"].numpy()[0]),) if "lora_slot" in bound else ()
    names = [name for name in bound if name.startswith(("lora_A", "lora_B"))]
    return {name: bound[name].read_storage()[row].copy() for name in names}


def scale_at(strength: Strength, binding: str) -> float:
    """What the longest prefix of those that there are says."""
    if not isinstance(strength, Mapping):
        return strength
    known = [prefix for prefix in strength if f"_{prefix}" in binding]
    return strength[max(known, key=len)] if known else 1.0


def expected(dtype: str, parts: Mapping[str, Strength]) -> dict[str, Array]:
    """B of the blend, each value rounded to the engine's dtype, scaled in float32, rounded once."""
    found: dict[str, list[Array]] = {}
    for seed, (_, strength) in enumerate(parts.items()):
        for name, values in make_weights(store_of(dtype).manifest, rank=RANK, seed=seed).items():
            scale = scale_at(strength, name)
            if name.startswith("lora_B"):
                exact = values.astype(storage_dtype(dtype)).astype(np.float32) * np.float32(scale)
                found.setdefault(name, []).append(exact.astype(storage_dtype(dtype)))
    return {name: np.concatenate(each, axis=-2) for name, each in found.items()}


def same(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """Check the bits of what is wanted, and that there are zeros behind."""
    for name, values in wanted.items():
        rows = values.shape[-2]
        assert found[name][..., :rows, :].tobytes() == values.tobytes(), name
        assert not found[name][..., rows:, :].any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_strength_has_the_bits_of_a_blend_made_anew_in_the_same_memory(
    make: Callable[[str], AdapterStore], dtype: str
) -> None:
    store, fresh = make(dtype), make(dtype)
    store.blend("x", {"a": 0.3, "b": 0.9})
    first, versions = bits(store, "x"), {store.info("x").version}
    pointers = {name: t.pointer for name, t in store.bindings.rows(["x"]).items()}
    for number, parts in enumerate((*SCALES, *SCALES)):  # every strength behind every other
        reads = store.stats.reads
        coverage = store.blend("x", parts, replace=True)
        same(found := bits(store, "x"), expected(dtype, parts))
        assert all(found[n].tobytes() == first[n].tobytes() for n in found if "_A_" in n)
        assert {n: t.pointer for n, t in store.bindings.rows(["x"]).items()} == pointers
        assert store.stats.reads == reads
        anew = fresh.blend(f"x{number}", parts, at_once=True)
        assert coverage.sites == anew.sites == store.get_coverage("x").sites
        assert store.info("x").content_hash == fresh.info(f"x{number}").content_hash
        assert store.info("x").version not in versions
        versions.add(store.info("x").version)
    store.blend("x", {"a": 0.3, "b": 0.9}, replace=True)
    same(bits(store, "x"), first)
    store.check_integrity()


def test_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = replace(make_manifest(n=1 << 16), max_lora_rank=16)
    store = AdapterStore(FakeExecutor(manifest))
    for seed, name in enumerate("ab"):
        weights = make_weights(manifest, rank=RANK, seed=seed)
        tensors = {n: tensor_from_storage(w, "float32") for n, w in weights.items()}
        store.add(name, Adapter(name, {n: weight_of(n, t) for n, t in tensors.items()}))
    for scale in (1.0, 2.0):
        store.blend("x", {"a": scale, "b": 1}, replace=True, at_once=True)
    monkeypatch.setattr(host, "_pages", None)  # of which adapters are made
    tracemalloc.start()
    store.blend("x", {"a": 3.0, "b": {"model.layers.1": 0.5}}, replace=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 10 < 4 * 2 * RANK * (1 << 16)  # one B of the blend


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float32", 3e38), ("float16", 1e5), ("float32", 1e39)]
)
def test_values_out_of_range_are_refused_and_the_blend_is_as_it_was(
    make: Callable[[str], AdapterStore], dtype: str, scale: float
) -> None:
    store = make(dtype)
    store.blend("x", {"a": 0.7, "b": 0.3}, at_once=True)
    store.pin("x")
    before, info, coverage = bits(store, "x"), store.info("x"), store.get_coverage("x")
    with pytest.raises(AdapterError, match=rf"x: lora_B_{LAST}.* has a value .*range of {dtype}"):
        store.blend("x", {"a": 0.5, "b": {LAST: scale}}, replace=True)  # behind all others
    same(bits(store, "x"), before)
    assert (store.info("x"), store.get_coverage("x")) == (info, coverage)
    store.blend("x", {"a": 1, "b": 1}, replace=True)
    same(bits(store, "x"), expected(dtype, {"a": 1, "b": 1}))
    assert store.info("x").is_pinned
    store.check_integrity()


def test_a_copy_to_the_device_that_fails_leaves_the_old_values(
    make: Callable[[str], AdapterStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make("float32")
    store.blend("x", SCALES[0])
    before, device = bits(store, "x"), store._levels.device
    copy, calls = device.rewrite, list[object]()

    def fail_once(*args: object) -> None:
        copy(*args)  # type: ignore[arg-type]
        calls.append(args)
        if len(calls) == 1:
            raise BackendError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(device, "rewrite", fail_once)
        with pytest.raises(BackendError, match="lost"):
            store.blend("x", SCALES[1], replace=True)
    same(bits(store, "x"), before)
    store.check_integrity()


def test_a_leased_blend_is_not_written_under_its_reader(
    make: Callable[[str], AdapterStore],
) -> None:
    store = make("float32")
    store.blend("x", SCALES[0])
    lease = store.lease("x")
    store.bindings.activate(lease)
    version, held = lease.version, bits(store, lease)
    store.blend("x", SCALES[1], replace=True)
    same(bits(store, "x"), expected("float32", SCALES[1]))
    same(bits(store, lease), held)
    assert store.info("x").version != version == lease.version
    store.release(lease)
    store.check_integrity()


def test_who_wants_a_blend_that_is_being_written_waits_for_the_new_values(
    make: Callable[[str], AdapterStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make("float32")
    store.blend("x", SCALES[0])
    bits(store, "x")
    device, old = store._levels.device, store.info("x").version
    copy = device.rewrite
    leases = list[Future[Lease]]()
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:

        def meanwhile(*args: object) -> None:
            leases.append(pool.submit(store.lease, "x"))
            eventually(lambda: store.info("x").leases == 1)
            assert not leases[0].done()
            assert not store.info("x").is_resident
            store.check_integrity()
            copy(*args)  # type: ignore[arg-type]

        patch.setattr(device, "rewrite", meanwhile)
        store.blend("x", SCALES[1], replace=True)
        lease = leases[0].result()
    assert lease.version == store.info("x").version != old
    same(bits(store, "x"), expected("float32", SCALES[1]))
    store.release(lease)
    store.check_integrity()


def test_what_is_made_of_it_is_gone_and_other_parts_are_made_anew(
    make: Callable[[str], AdapterStore],
) -> None:
    store = make("float32")
    store.blend("x", SCALES[0])
    store.blend("of x", {"x": 1})
    bits(store, "x@0.5")
    bits(store, "x")
    store.blend("x", SCALES[1], replace=True)
    with pytest.raises(UnknownAdapterError, match="'of x' was made of 'x'"):
        store.lease("of x")
    wanted = expected("float32", SCALES[1])
    same(bits(store, "x@0.5"), {name: values * np.float32(0.5) for name, values in wanted.items()})
    reads = store.stats.reads
    store.blend("x", {"b": 1, "a": 2}, replace=True)  # in another order
    found = bits(store, "x")
    assert store.stats.reads == reads + 1
    anew = expected("float32", {"a": 2, "b": 1})
    same(found, {n: np.roll(values, RANK, axis=-2) for n, values in anew.items()})
    store.unload("x")
    store.check_integrity()
