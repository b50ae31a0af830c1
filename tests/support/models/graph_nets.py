"""A small torch model, its graphs by three exporters, and an adapter that PEFT made for it."""

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import peft
import torch
from torch import nn

from trt_lora.runtime import Manifest

SIZES = ("batch=1:2:4", "tokens=1:5:16")
TARGETS = ["proj_in", "to_q", "to_v", "to_out.0", "ff.0", "ff.2"]
Floats = npt.NDArray[np.float32]


class Block(nn.Module):
    """Attention as diffusers names it, and a Sequential."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.to_v, self.to_out = nn.Linear(width, width), nn.ModuleList([nn.Linear(width, width)])
        self.ff = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.to_q(x) @ self.to_k(x).transpose(1, 2)
        x = x + self.to_out[0](torch.softmax(scores, -1) @ self.to_v(x))
        out: torch.Tensor = x + self.ff(x)
        return out


class Net(nn.Module):
    """[batch, tokens, 8] to [batch, tokens, 4]; one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in, self.blocks = nn.Linear(8, 16), nn.ModuleList([Block(16), Block(16)])
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(sample) + self.proj_in(sample * sample)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Exported:
    """The model, what PEFT made of it, and one graph a exporter."""

    net: nn.Module
    adapted: nn.Module
    adapter: Path
    graphs: dict[str, Path]

    def outputs(self, sample: Floats) -> tuple[Floats, Floats]:
        """Of the model, and with the adapter."""
        with torch.no_grad():
            both = [net(torch.from_numpy(sample)).numpy() for net in (self.net, self.adapted)]
        return both[0], both[1]


@dataclass(frozen=True)
class Built:
    """An engine directory and its manifest."""

    engine: Path
    manifest: Manifest


def export(folder: Path) -> Exported:
    """Write the graphs and the adapter to a folder."""
    torch.manual_seed(0)
    net = Net().eval()
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(net), config).eval()
    adapted.save_pretrained(str(folder / "adapter"))
    kinds: dict[str, dict[str, Any]] = {
        "dynamo": {"dynamo": True, "optimize": False},
        "dynamo_optimized": {"dynamo": True},
        "torchscript": {"dynamo": False},
    }
    graphs = {kind: folder / f"{kind}.onnx" for kind in kinds}
    for kind, options in kinds.items():
        _export(net, graphs[kind], options)
    return Exported(net, adapted, folder / "adapter", graphs)


def _export(net: nn.Module, path: Path, options: dict[str, Any]) -> None:
    axes = {0: "batch", 1: "tokens"}
    sizes: dict[str, Any] = {"dynamic_axes": {"sample": axes, "out": axes}}
    if options["dynamo"]:
        dims = {axis: torch.export.Dim(name) for axis, name in axes.items()}
        sizes = {"dynamic_shapes": {"sample": dims}, "external_data": False, "verbose": False}
    names: dict[str, Any] = {
        "input_names": ["sample"],
        "output_names": ["out"],
        "opset_version": 18,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.randn(2, 5, 8),), str(path), **names, **sizes, **options)
