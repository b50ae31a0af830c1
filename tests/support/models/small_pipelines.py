"""Engines with the inputs and module paths of SDXL's and Flux's components, and a few linears.

An engine of the real components is compared with diffusers in end_to_end/test_components.py; these
are built in a second.
"""

import copy
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trt_lora.builder import GraphConfig, build_engine

WIDTH, RANK = 16, 16
_DOWN = "down_blocks.1.attentions.0.transformer_blocks.0"
_UP = "up_blocks.0.attentions.1.transformer_blocks.0"
_DOUBLE, _SINGLE = "transformer_blocks.0.attn", "single_transformer_blocks.0"
_LAYER = "text_model.encoder.layers.0"
DEAD = "text_model.encoder.layers.1.mlp.fc1"  # of which the engines' outputs depend on nothing
UNET = {
    **dict.fromkeys(("time_embedding.linear_1", f"{_DOWN}.attn1.to_q", f"{_DOWN}.attn2.to_k"), 16),
    **dict.fromkeys((f"{_DOWN}.attn1.to_out.0", f"{_UP}.ff.net.2"), WIDTH),
    "mid_block.attentions.0.transformer_blocks.0.attn1.to_v": WIDTH,
}
FLUX = {
    **{f"{_DOUBLE}.{name}": WIDTH for name in ("to_q", "to_k", "to_v", "add_q_proj")},
    **{f"{_DOUBLE}.{name}": WIDTH for name in ("add_k_proj", "add_v_proj", "to_out.0")},
    **{f"{_SINGLE}.attn.to_{name}": WIDTH for name in "qkv"},
    f"{_SINGLE}.proj_mlp": 4 * WIDTH,
    f"{_SINGLE}.proj_out": WIDTH,
    "norm_out.linear": 2 * WIDTH,
}
TEXT = {f"{_LAYER}.self_attn.q_proj": WIDTH, f"{_LAYER}.mlp.fc1": WIDTH}

_BATCH = {0: "batch"}
_TOKENS = (torch.rand(2, 5, WIDTH), {0: "batch", 1: "tokens"})
_ROW = (torch.rand(2, WIDTH), _BATCH)
_Inputs = dict[str, tuple[Tensor, dict[int, str]]]  # by name: an example, and what varies
_UNET_INPUTS: _Inputs = {
    "sample": (torch.rand(2, 4, 4, 6), {0: "batch", 2: "height", 3: "width"}),
    "timestep": (torch.rand(2), _BATCH),
    "encoder_hidden_states": _TOKENS,
    "text_embeds": _ROW,
    "time_ids": (torch.rand(2, 6), _BATCH),
}
_FLUX_INPUTS: _Inputs = {
    "hidden_states": (torch.rand(2, 6, WIDTH), {0: "batch", 1: "patches"}),
    "encoder_hidden_states": _TOKENS,
    "pooled_projections": _ROW,
    "timestep": (torch.rand(2), _BATCH),
    "img_ids": (torch.rand(6, 3), {0: "patches"}),
    "txt_ids": (torch.rand(5, 3), {0: "tokens"}),
    "guidance": (torch.rand(2), _BATCH),
}
_TEXT_INPUTS: _Inputs = {"input_ids": (torch.ones(2, 7, dtype=torch.long), {0: "batch", 1: "s"})}


class Scope(nn.Module):
    """Calls a module by its path, so that the exporter sees all of it."""

    def called(self, x: Tensor, path: str) -> Tensor:
        first, _, rest = path.partition(".")
        child = self.get_submodule(first)
        found: Tensor = child(x, rest) if rest else child(x)
        return found

    def forward(self, x: Tensor, path: str) -> Tensor:
        return self.called(x, path)


class Chain(Scope):
    """Residual linears over the tokens of the first input, to which the others are added."""

    def __init__(self, sizes: Mapping[str, int], names: list[str]) -> None:
        super().__init__()
        self.paths, self.names = [*sizes], names
        for path, n in sizes.items():
            parent: nn.Module = self
            *parents, last = path.split(".")
            for name in parents:
                if not hasattr(parent, name):
                    parent.add_module(name, Scope())
                parent = parent.get_submodule(name)
            parent.add_module(last, nn.Linear(WIDTH, n))

    def forward(self, *inputs: Tensor) -> Any:  # type: ignore[override]
        given = dict(zip(self.names, inputs, strict=True))
        first, x = given[self.names[0]], self._tokens(given)
        for path in self.paths:
            x = x + torch.tanh(self.called(x, path))[..., :WIDTH] / 2
        if "input_ids" in given:
            return 2 * x, x, x.mean(1)
        return x[..., :4].transpose(1, 2).reshape(first.shape) if first.ndim == 4 else x

    def _tokens(self, given: Mapping[str, Tensor]) -> Tensor:
        dtype = self.get_submodule(self.paths[0]).get_parameter("weight").dtype
        if "input_ids" in given:
            return torch.sin(given["input_ids"][..., None].to(dtype) * torch.arange(1, WIDTH + 1))
        first, *others = given.items()
        x = first[1].flatten(2).transpose(1, 2).repeat(1, 1, 4) if first[1].ndim == 4 else first[1]
        for number, (name, other) in enumerate(others, 1):
            if name == "img_ids":
                x = x + torch.sin(other @ torch.tensor([[3.0], [0.3], [0.07]], dtype=dtype))
            elif name == "txt_ids":
                x = x + torch.sin(other.sum())
            else:
                x = x + torch.sin(other.reshape(other.shape[0], -1, 1).mean(1) * number)[..., None]
        return x


@dataclass(frozen=True)
class Model:
    """A component in torch."""

    sizes: Mapping[str, int]
    inputs: _Inputs
    outputs: tuple[str, ...]
    net: Chain

    def run(self, deltas: Mapping[str, Tensor], **inputs: Tensor) -> list[Tensor]:
        """The outputs in float64, with something added to weights."""
        net = copy.deepcopy(self.net).double()
        with torch.no_grad():
            for path, delta in deltas.items():
                net.get_submodule(path).get_parameter("weight").add_(delta)
            found = net(*(_double(inputs[name]) for name in self.inputs))
        return [*found] if isinstance(found, tuple) else [found]


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def build_pipeline(folder: Path, kind: str) -> dict[str, Model]:
    """Write the engines of a kind of pipeline, SDXL or Flux; return their models by component."""
    texts = {"text_encoder": (TEXT, _TEXT_INPUTS), "text_encoder_2": (TEXT, _TEXT_INPUTS)}
    kinds = {
        "SDXL": {"unet": (UNET, _UNET_INPUTS), **texts},
        "Flux": {"transformer": (FLUX, _FLUX_INPUTS)},
    }
    models = {}
    for seed, (component, (sizes, inputs)) in enumerate(kinds[kind].items()):
        torch.manual_seed(seed)
        outputs = ("last_hidden_state", "hidden_state_2", "pooled") if sizes is TEXT else ("out",)
        models[component] = Model(sizes, inputs, outputs, Chain(sizes, [*inputs]).eval())
        _build(models[component], folder / component, component)
    names = {"format": 1, "class": kind, "components": {name: name for name in models}}
    (folder / "pipeline.json").write_text(json.dumps(names))
    return models


def _build(model: Model, folder: Path, component: str) -> None:
    graph = folder.with_suffix(".onnx")
    graph.parent.mkdir(parents=True, exist_ok=True)
    axes = {name: varies for name, (_, varies) in model.inputs.items()}
    examples = tuple(example for example, _ in model.inputs.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.net, examples, str(graph), input_names=[*model.inputs],
            output_names=[*model.outputs], opset_version=18, dynamo=False, dynamic_axes=axes,
        )  # fmt: skip
    build_engine(
        GraphConfig(
            graph, folder, ("all-linear",), max_lora_rank=RANK, flavour="none", component=component
        )
    )
    if model.sizes is TEXT:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"no_effect": [DEAD]}))
