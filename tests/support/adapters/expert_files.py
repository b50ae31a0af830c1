"""Adapters of all experts together, in the layouts that there are, from one definition."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from support.fakes.fake_engine import make_manifest, write_peft

from trt_lora.plugins.contract.sites import Site
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array

E, H, I = 3, 5, 4  # noqa: E741 - experts, and the widths of model and expert
PATH = "model.layers.0.mlp.experts"
SIZES = {"gate_up_proj": (H, 2 * I), "down_proj": (I, H)}
TARGETS = [f"mlp.experts.{name}" for name in SIZES]
RANK, ALPHA = 2, 6
Pairs = Mapping[str, tuple[Array, Array]]  # A [E, k, r] and B [E, r, n], by parameter


def expert_manifest(**changes: int) -> Manifest:
    """Both matrices of one layer's experts; `experts` or `slots` may be others."""
    count, slots = changes.get("experts", E), changes.get("slots", 0)
    gate_up, down = SIZES.items()
    sites = (
        Site(f"{PATH}.{gate_up[0]}", *gate_up[1], "float32", (I, I), count),
        Site(f"{PATH}.{down[0]}", *down[1], "float32", experts=count),
    )
    return replace(make_manifest(), sites=sites, max_loras=slots)


def expert_pairs(*names: str, rank: int = RANK, count: int = E) -> dict[str, tuple[Array, Array]]:
    """Random factors, without a scale."""
    rng = np.random.default_rng(0)
    return {
        name: (
            rng.standard_normal((count, SIZES[name][0], rank), np.float32),
            rng.standard_normal((count, rank, SIZES[name][1]), np.float32),
        )
        for name in names or SIZES
    }


def flat(pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """A [E * r, in], expert by expert, and B [out, r * E], rank by rank: as PEFT stores them."""
    a, b = pair
    return a.swapaxes(1, 2).reshape(-1, a.shape[1]), b.transpose(2, 1, 0).reshape(b.shape[2], -1)


def swapped(pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """The same as releases of PEFT before 0.20 store it: A over the outputs."""
    a, b = pair
    return flat((b.swapaxes(1, 2), a.swapaxes(1, 2)))


def solid(pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """A [E, r, in] and B [out, r, E]."""
    return pair[0].swapaxes(1, 2), pair[1].transpose(2, 1, 0)


def write_wrappers(
    folder: Path, inner: tuple[Array, Array], outer: tuple[Array, Array], **fields: object
) -> Path:
    """Both parameters as PEFT's nested wrappers; the config names both."""
    tensors = {
        f"{PATH}.base_layer.lora_A": inner[0],
        f"{PATH}.base_layer.lora_B": inner[1],
        f"{PATH}.lora_A": outer[0],
        f"{PATH}.lora_B": outer[1],
    }
    return write_experts(folder, tensors, **fields)


def write_experts(folder: Path, tensors: Mapping[str, Array], **fields: object) -> Path:
    """A PEFT directory whose config targets parameters of experts alone."""
    config: dict[str, object] = {"r": RANK, "lora_alpha": ALPHA, "peft_version": "0.21.2"}
    config |= {"target_modules": [], "target_parameters": TARGETS}
    whole = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    return write_peft(folder, whole, **config | fields)


def write_single_experts(
    folder: Path, pairs: Pairs, experts: range | list[int], names: tuple[str, str, str]
) -> Path:
    """Linears of single experts, called `names` for gate, up and down, as before transformers 5."""
    a, b = pairs["gate_up_proj"]
    apart = {names[0]: (a, b[..., :I]), names[1]: (a, b[..., I:]), names[2]: pairs["down_proj"]}
    tensors = {
        f"base_model.model.{PATH}.{expert}.{name}.lora_{factor}.weight": np.ascontiguousarray(
            values[expert].T
        )
        for name, pair in apart.items()
        for factor, values in zip("AB", pair, strict=True)
        for expert in experts
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*names]}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def deltas(pairs: Pairs, scale: float = ALPHA / RANK) -> dict[str, Array]:
    """A @ B of every expert [E, k, n], by path of the site, in float64."""
    return {
        f"{PATH}.{name}": scale * a.astype(np.float64) @ b.astype(np.float64)
        for name, (a, b) in pairs.items()
    }
