"""Workloads of diffusion models: their shapes, and that every way is timed."""

from collections import Counter
from pathlib import Path

import pytest
from torch import nn

from trt_lora.scripts.bench.diffusion import denoiser_step
from trt_lora.scripts.bench.diffusion.shapes import sdxl_sites
from trt_lora.scripts.bench.strengths import ANEW, IN_PLACE, measured


def test_sdxl_has_its_722_linears_of_43_million_values_at_rank_16() -> None:
    sites = sdxl_sites("float32")
    assert len({site.path for site in sites}) == 722
    assert round(sum(16 * (site.k + site.n) for site in sites) / 1e6) == 43
    assert Counter(site.path.partition(".")[0] for site in sites) == {
        "down_blocks": 248, "mid_block": 102, "up_blocks": 372
    }  # fmt: skip


@pytest.mark.slow
def test_steps_of_a_unet_are_timed_by_every_way(tmp_path: Path) -> None:
    model = denoiser_step.unet((32,), text=16)
    row = denoiser_step.compared(model, tmp_path, side=8, rounds=2)
    taken = [each for each in model.modules() if isinstance(each, nn.Linear)]
    taken += [each for each in model.modules() if getattr(each, "kernel_size", 0) == (1, 1)]
    assert row.sizes["sites"] == len(taken)
    assert len(row.variants) == 5
    assert {name.partition(",")[0] for name in row.ratios} == {
        f"{name} / plain" for name in ("dummies", "rank 16", "diffusers", "diffusers + PEFT")
    }


def test_a_strength_is_timed_in_place_and_made_anew() -> None:
    row = measured(sdxl_sites("float16")[:2], "ab", rounds=2)
    assert row.sizes["blend, MB"] == 2 * 2 * (640 + 640) * 32 / 1e6
    assert all(value > 0 for value in row.variants.values())
    assert set(row.ratios) == {f"{IN_PLACE} / {ANEW}"}
