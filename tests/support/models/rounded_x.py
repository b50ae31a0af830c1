"""PEFT models whose base layers alone read x rounded, and how far an engine is from them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file
from support.models.quantised import ADAPTER, VOCABULARY

from trt_lora.runtime import open_engine
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.verification.logits import engine_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

IDS = np.random.default_rng(0).integers(0, VOCABULARY, (1, 40))
Rounding = Callable[[torch.Tensor, float], torch.Tensor]  # of x, by a linear's scale


def answers(engine: Path) -> dict[str, Any]:
    """Logits of the base model and of the adapter, of a prompt and of steps behind it."""
    with open_engine(engine, "onnxruntime") as running:
        running.adapters.load("adapter", ADAPTER, strict=False)
        return {name: engine_logits(running, name, IDS, prompt=8) for name in ("", "adapter")}


def x_scales(model: Path) -> dict[str, float]:
    """The scale of what each linear reads, by path."""
    tensors = load_file(model / "model.safetensors")
    ends = ((name, name.removesuffix(".input_scale")) for name in tensors)
    return {path: float(tensors[name]) for name, path in ends if path != name}


def with_rounded_x(
    reference: PeftReference, scales: Mapping[str, float], rounded: Rounding
) -> PeftReference:
    """Let base layers alone read x rounded; A and B read it as it is."""
    for name, module in reference.model.named_modules():
        path = name.removeprefix("base_model.model.").removesuffix(".base_layer")
        if path in scales and isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(partial(_rounded, rounded, scales[path]))
    return reference


def _rounded(
    rounded: Rounding, scale: float, _: Any, args: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor]:
    return (rounded(args[0], scale),)


def float8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Round x to E4M3 times a scale."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def int8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Round x to 8 bits times a scale."""
    return (x / scale).round().clamp(-128, 127) * scale


def nvfp4(x: torch.Tensor, unit: float) -> torch.Tensor:
    """Round x to E2M1 in blocks of 16 with scales of E4M3 times a unit, by ml_dtypes."""
    return torch.from_numpy(nvfp4_array(x.float().numpy(), unit)).reshape(x.shape)


def nvfp4_array(x: Array, unit: float) -> Array:
    """Return the same of an array [.., k] of float32."""
    blocks = x.reshape(-1, 16)
    wanted = abs(blocks).max(-1, keepdims=True) / np.float32(6) / np.float32(unit)
    steps = wanted.clip(max=448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    steps = steps * np.float32(unit)
    values = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0).clip(-6, 6)
    found: Array = values.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * steps
    return found.reshape(x.shape)


def error(found: dict[str, Any], reference: PeftReference) -> float:
    """The largest difference of logits, in units of the largest logit."""
    differences = []
    for name, ours in found.items():
        theirs = reference.logits(name, IDS, np.ones_like(IDS))
        differences.append(np.abs(ours - theirs).max() / np.abs(theirs).max())
    return float(max(differences))
