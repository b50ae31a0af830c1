"""Diffusion adapters written as PEFT's: PEFT loads them onto linears and convolutions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.adapters.diffusion.models import Deltas, assert_same, deltas
from support.adapters.diffusion.writing import PEFT, Writing
from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.adapters.fitting.dora import with_scales
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.adapters.save import save_adapter
from trt_lora.runtime.files.stored_matrix import Block
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

pytestmark = pytest.mark.needs_torch

SITES = {"to_q": (8, 6), "conv1": (36, 6), "proj_in": (4, 6)}


class Net(torch.nn.Module):
    """A linear, a convolution of nine taps and one of one."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = torch.nn.Linear(8, 6)
        self.conv1 = torch.nn.Conv2d(4, 6, 3)
        self.proj_in = torch.nn.Conv2d(4, 6, 1)


def manifest(*, vectors: bool = False) -> Manifest:
    sites = tuple(Site(path, k, n, "float32") for path, (k, n) in SITES.items())
    return replace(make_manifest(), sites=sites, lora_vectors=vectors)


def peft_deltas(model: Any) -> Deltas:
    found = {}
    for path in SITES:
        layer = getattr(model.base_model.model, path)
        delta = layer.get_delta_weight("default").detach().double().numpy()
        found[path] = delta.reshape(len(delta), -1)
    return found


def test_peft_directories_with_convolutions_are_read(tmp_path: Path) -> None:
    config = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=[*SITES],
        rank_pattern={"conv1": 3},
        init_lora_weights=False,
    )
    model = get_peft_model(Net(), config)
    model.save_pretrained(str(tmp_path))
    assert_same(deltas(tmp_path, manifest()), peft_deltas(model))


@pytest.mark.parametrize("tucker", [False, True])
def test_peft_reads_what_is_written(tmp_path: Path, tucker: bool) -> None:
    writing = Writing(manifest())
    writing.add("lora_unet_to_q", "to_q", alpha=np.float16(1))
    writing.add("lora_unet_conv1", "conv1", alpha=np.float32(8), rank=3, taps=(3, 3))
    writing.add("lora_unet_proj_in", "proj_in", taps=(1, 1))
    if tucker:
        kernel = writing.tensors.pop("lora_unet_conv1.lora_down.weight")
        core = kernel.reshape(3, 4, 3, 3)  # of 3 rows, with 4 channels as they are
        writing.tensors["lora_unet_conv1.lora_mid.weight"] = core
        writing.tensors["lora_unet_conv1.lora_down.weight"] = np.eye(4, dtype="f")[..., None, None]
        writing.expected["conv1"] *= 3 / 4  # alpha is divided by the rows of down
    file = writing.save(tmp_path / "a.safetensors")
    save_adapter(load_adapter(file, manifest()), tmp_path / "peft", "peft", manifest=manifest())
    model = PeftModel.from_pretrained(Net(), str(tmp_path / "peft"))
    assert_same(peft_deltas(model), writing.expected)
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["task_type"] is None
    assert_same(deltas(tmp_path / "peft", manifest()), writing.expected)


@pytest.mark.parametrize("name", ["dora_scale", "lora_magnitude_vector"])
def test_dora_is_that_of_peft_where_the_engine_has_vectors(tmp_path: Path, name: str) -> None:
    """A scale of m / |W + s B A| for every output."""
    writing = Writing(manifest())
    ends = ("lora_down.weight", "lora_up.weight") if name == "dora_scale" else PEFT
    writing.add("unet.to_q", "to_q", ends=ends, scale=0.5 if name == "dora_scale" else 1.0,
                alpha=np.float32(1) if name == "dora_scale" else None)  # fmt: skip
    magnitude = np.abs(writing.random(6, 1)) + 1
    stored = magnitude if name == "dora_scale" else magnitude[:, 0]
    writing.tensors[f"unet.to_q.{name}"] = stored
    adapter = load_adapter(writing.save(tmp_path / "a.safetensors"), manifest(vectors=True))
    w = writing.random(8, 6)
    scaled = with_scales(adapter, lambda path: [block_of(w)], ["to_q"])
    (found,) = scaled.vectors.values()
    norms = np.linalg.norm(w.astype(np.float64).T + writing.expected["to_q"], axis=1)
    np.testing.assert_allclose(found.values(), magnitude[:, 0] / norms, rtol=1e-6)


def block_of(w: Array) -> Block:
    return slice(0, 8), slice(0, 6), w
