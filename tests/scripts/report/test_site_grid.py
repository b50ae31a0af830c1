"""Grid of sites: a module's row holds each layer's rank, dummy, or nothing."""

from dataclasses import replace

from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.report.site_grid import site_grid

Q0, V0, V1 = (f"model.layers.{n}.self_attn.{p}" for n, p in ((0, "q"), (0, "v"), (1, "v")))


def engine(*paths: str) -> Manifest:
    return replace(make_manifest(), sites=tuple(Site(path, 8, 6, "float32") for path in paths))


def test_a_cell_is_a_rank_a_dummy_or_no_site() -> None:
    grid = site_grid(engine(Q0, V0, V1), {Q0: 4, V1: 16})
    kinds = {module: [cell.kind for cell in cells] for module, cells in grid.rows.items()}
    assert grid.layers == (0, 1)
    assert kinds == {"self_attn.q": ["bound", "none"], "self_attn.v": ["dummy", "bound"]}
    assert [cell.rank for cell in grid.rows["self_attn.v"]] == [0, 16]


def test_layers_are_in_the_order_of_their_numbers_and_what_has_none_comes_last() -> None:
    paths = [f"layers.{n}.up" for n in (10, 2, 0)]
    grid = site_grid(engine("lm_head", *paths), {"lm_head": 8})
    assert grid.layers == (0, 2, 10, None)
    assert [cell.kind for cell in grid.rows["lm_head"]] == ["none", "none", "none", "bound"]


def test_modules_of_one_name_in_a_layer_are_rows_of_their_own() -> None:
    grid = site_grid(engine("h.0.attn.c_proj", "h.0.mlp.c_proj"), {})
    assert list(grid.rows) == ["attn.c_proj", "mlp.c_proj"]
