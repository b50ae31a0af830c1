"""Shares of an adapter for tensor parallelism: together they compute what the whole computes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.contract.sites import BindingNames, Site
from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.shard import shard_adapter
from trt_lora.runtime.adapters.weight import weight_of
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import tensor_from_numpy

HEAD, HIDDEN, INNER, RANK = 3, 24, 20, 2
LAYER = "model.layers.0."
QKV = (24, 12, 12)  # eight heads of three, four of k and v

COLUMN = {
    "self_attn.q_proj": (HIDDEN, 24),
    "self_attn.k_proj": (HIDDEN, 12),
    "self_attn.v_proj": (HIDDEN, 12),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
}
ROW = {"self_attn.o_proj": (24, HIDDEN), "mlp.down_proj": (INNER, HIDDEN)}
FUSED = {"self_attn.qkv_proj": (HIDDEN, QKV), "mlp.gate_up_proj": (HIDDEN, (INNER, INNER))}


def site(path: str, k: int, n: int | tuple[int, ...]) -> Site:
    if isinstance(n, tuple):
        return Site(f"{LAYER}{path}", k, sum(n), "float32", n)
    return Site(f"{LAYER}{path}", k, n, "float32")


def manifest_of(
    *sites: Site, head_dim: int = HEAD, names: BindingNames = BindingNames.LORA
) -> Manifest:
    manifest = make_manifest(names=names)
    base = replace(manifest.base_model, head_dim=head_dim)
    return replace(manifest, sites=sites, base_model=base)


SPLIT_ENGINE = manifest_of(*(site(path, *size) for path, size in (COLUMN | ROW).items()))
FUSED_ENGINE = manifest_of(*(site(path, *size) for path, size in FUSED.items()))


def adapter_of(manifest: Manifest, names: BindingNames = BindingNames.LORA) -> Adapter:
    rng = np.random.default_rng(0)
    weights = {}
    for one in manifest.sites:
        for factor in ("A", "B"):
            name = names.binding(factor, one.path)
            array = rng.standard_normal(one.shape(factor, RANK), np.float32)
            weights[name] = weight_of(name, tensor_from_numpy(array))
    return Adapter("some/adapter", weights, "org/base")


def shards(adapter: Adapter, manifest: Manifest, size: int) -> list[dict[str, tuple[Array, Array]]]:
    """A and B of every site in float64, rank by rank."""
    return [
        {
            path: (a.values().astype(np.float64), b.values().astype(np.float64))
            for path, (a, b) in shard_adapter(adapter, manifest, rank, size).pairs().items()
        }
        for rank in range(size)
    ]


def whole_pair(adapter: Adapter, path: str) -> tuple[Array, Array]:
    a, b = adapter.pairs()[path]
    return a.values().astype(np.float64), b.values().astype(np.float64)


def x_of(k: int) -> Array:
    return np.random.default_rng(1).standard_normal((5, k))


SIZES = [1, 2, 4]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", COLUMN)
def test_column_parallel_ranks_compute_the_columns_in_order(path: str, size: int) -> None:
    adapter, full = adapter_of(SPLIT_ENGINE), f"{LAYER}{path}"
    a, b = whole_pair(adapter, full)
    x = x_of(HIDDEN)
    found = [of_rank[full] for of_rank in shards(adapter, SPLIT_ENGINE, size)]
    assert {part[1].shape for part in found} == {(RANK, b.shape[1] // size)}
    y = np.concatenate([x @ part_a @ part_b for part_a, part_b in found], axis=1)
    np.testing.assert_allclose(y, x @ a @ b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", ROW)
def test_row_parallel_ranks_sum_up_to_the_whole(path: str, size: int) -> None:
    adapter, full = adapter_of(SPLIT_ENGINE), f"{LAYER}{path}"
    a, b = whole_pair(adapter, full)
    x = x_of(len(a))
    found = [of_rank[full] for of_rank in shards(adapter, SPLIT_ENGINE, size)]
    assert {part[0].shape for part in found} == {(len(a) // size, RANK)}
    parts = np.split(x, size, axis=1)  # what each rank's part of the activation is
    y = sum(own @ part_a @ part_b for own, (part_a, part_b) in zip(parts, found, strict=True))
    np.testing.assert_allclose(y, x @ a @ b, rtol=0, atol=1e-12)


def per_part(ranks: Sequence[Array], widths: Sequence[int]) -> Array:
    """The whole y of a fused linear, from ranks that each compute a share of every part."""
    starts = np.cumsum([0, *widths]) // len(ranks)
    return np.concatenate(
        [y[:, start:stop] for start, stop in pairwise(starts) for y in ranks],
        axis=1,
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("path", FUSED)
def test_every_rank_has_a_share_of_every_part_of_a_fused_linear(path: str, size: int) -> None:
    adapter, full = adapter_of(FUSED_ENGINE), f"{LAYER}{path}"
    a, b = whole_pair(adapter, full)
    x = x_of(HIDDEN)
    ranks = [x @ r[full][0] @ r[full][1] for r in shards(adapter, FUSED_ENGINE, size)]
    widths = FUSED[path][1]
    np.testing.assert_allclose(per_part(ranks, widths), x @ a @ b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_a_split_adapter_is_fused_before_it_is_shared(size: int) -> None:
    adapter, fused = adapter_of(SPLIT_ENGINE), FUSED_ENGINE.sites[0]
    own = [path for path in COLUMN if path.startswith("self_attn")]
    names = {f"{LAYER}{path}" for path in own}
    some = replace(adapter, weights={n: w for n, w in adapter.weights.items() if n[7:] in names})
    x = x_of(HIDDEN)
    ranks = [x @ r[fused.path][0] @ r[fused.path][1] for r in shards(some, FUSED_ENGINE, size)]
    pairs = [whole_pair(adapter, f"{LAYER}{path}") for path in own]
    expected = np.concatenate([x @ a @ b for a, b in pairs], axis=1)
    np.testing.assert_allclose(per_part(ranks, QKV), expected, rtol=0, atol=1e-12)


def test_one_rank_has_the_whole_adapter() -> None:
    adapter = adapter_of(SPLIT_ENGINE)
    alone = shard_adapter(adapter, SPLIT_ENGINE, 0, 1)
    assert alone.content_hash == adapter.content_hash
    assert (alone.source, alone.base_model) == ("some/adapter", "org/base")


def test_a_replicated_linear_is_whole_on_every_rank() -> None:
    engine = manifest_of(site("block_sparse_moe.gate", HIDDEN, 7))
    adapter = adapter_of(engine)
    for rank in range(4):
        shared = shard_adapter(adapter, engine, rank, 4)
        assert shared.content_hash == adapter.content_hash


def test_the_spelling_of_the_engines_names_does_not_matter() -> None:
    sites = SPLIT_ENGINE.sites
    engine = manifest_of(*sites, names=BindingNames.EDGELLM)
    found = shard_adapter(adapter_of(engine, BindingNames.EDGELLM), engine, 1, 2)
    expected = shard_adapter(adapter_of(SPLIT_ENGINE), SPLIT_ENGINE, 1, 2)
    assert found.content_hash == expected.content_hash


def test_sites_without_weights_are_left_out() -> None:
    adapter = adapter_of(manifest_of(SPLIT_ENGINE.sites[0]))
    assert shard_adapter(adapter, SPLIT_ENGINE, 0, 2).pairs().keys() == {SPLIT_ENGINE.sites[0].path}


def test_a_scale_beside_b_stays_there() -> None:
    adapter = adapter_of(SPLIT_ENGINE)
    scaled = {n: w.times(0.5) if n.startswith("lora_B") else w for n, w in adapter.weights.items()}
    whole = shards(adapter, SPLIT_ENGINE, 2)
    halves = shards(replace(adapter, weights=scaled), SPLIT_ENGINE, 2)
    for rank, pairs in enumerate(halves):
        for path, (a, b) in pairs.items():
            np.testing.assert_array_equal(a, whole[rank][path][0])
            np.testing.assert_array_equal(b, whole[rank][path][1] / 2)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "k", "n", "size", "message"),
    [
        ("self_attn.q_proj", 24, 24, 3, "3 ranks cannot share 8 heads of 3 evenly"),
        ("self_attn.k_proj", 24, 12, 8, "8 ranks cannot share 4 heads of 3 evenly"),
        ("self_attn.v_proj", 24, 6, 4, "4 ranks cannot share 2 heads of 3 evenly"),
        ("self_attn.qkv_proj", 24, QKV, 8, "8 ranks cannot share 4 heads of 3 evenly"),
        ("self_attn.o_proj", 24, 24, 16, "16 ranks cannot share 8 heads of 3 evenly"),
        ("mlp.gate_proj", 24, 20, 3, "3 ranks cannot share a width of 20 evenly"),
        ("mlp.gate_up_proj", 24, (20, 20), 8, "8 ranks cannot share a width of 20 evenly"),
        ("mlp.down_proj", 20, 24, 3, "3 ranks cannot share a width of 20 evenly"),
    ],
)
def test_what_cannot_be_shared_evenly_is_refused(
    path: str, k: int, n: int | tuple[int, ...], size: int, message: str
) -> None:
    engine = manifest_of(site(path, k, n))
    with pytest.raises(AdapterError) as caught:
        shard_adapter(adapter_of(engine), engine, 0, size)
    assert str(caught.value) == f"{LAYER}{path}: {message}"


def test_a_head_is_never_cut_although_its_width_is_even() -> None:
    engine = manifest_of(site("self_attn.k_proj", 24, 12), head_dim=6)
    with pytest.raises(AdapterError, match="4 ranks cannot share 2 heads of 6 evenly"):
        shard_adapter(adapter_of(engine), engine, 0, 4)
    unknown = manifest_of(site("self_attn.k_proj", 24, 12), head_dim=0)
    assert len(shards(adapter_of(unknown), unknown, 4)) == 4  # the config does not say


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (0, -1), (5, 4)])
def test_a_rank_that_does_not_exist_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"tp_rank is {rank} of {size}"):
        shard_adapter(adapter_of(SPLIT_ENGINE), SPLIT_ENGINE, rank, size)


def test_a_linear_that_the_module_table_does_not_list_is_refused() -> None:
    engine = manifest_of(site("mlp.adapter_proj", 8, 8))
    with pytest.raises(AdapterError, match="nothing says how tensor parallelism divides"):
        shard_adapter(adapter_of(engine), engine, 0, 2)


def test_a_fused_linear_without_its_widths_is_refused() -> None:
    for path in ("self_attn.qkv_proj", "self_attention.query_key_value"):
        engine = manifest_of(site(path, 24, 48))
        with pytest.raises(AdapterError, match="does not say where its parts begin"):
            shard_adapter(adapter_of(engine), engine, 0, 2)


def test_an_adapter_that_does_not_fit_the_model_is_refused() -> None:
    adapter = adapter_of(manifest_of(site("self_attn.q_proj", 25, 24)))
    with pytest.raises(AdapterError, match="expected"):
        shard_adapter(adapter, SPLIT_ENGINE, 0, 2)
