"""A step of a UNet with Stable Diffusion's blocks, of 52 million random values, on one thread.

diffusers, diffusers with PEFT, and the graph in ONNX Runtime: without LoRA inputs, with dummies,
and with an adapter on every linear and every convolution without a kernel. It is traced once, into
`engines/denoiser`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.runtime.manifest import ONNX_FILE, Manifest, read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.measuring.random_weights import random_weights
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import alternate

FOLDER = Path("engines/denoiser")
RANK, ROUNDS, SIDE, BATCH, TOKENS, TEXT = 16, 16, 32, 2, 77, 768
WIDTHS = (128, 256, 512)
PLAIN, DUMMIES, ADAPTED = "plain", "dummies", "rank 16"
DIFFUSERS, PEFT = "diffusers", "diffusers + PEFT"

Step = Callable[[], object]


def rows() -> Iterator[ResultRow]:
    """Compare steps in turns, and the best of each: others' work only ever adds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = unet(WIDTHS)
    with torch.no_grad():
        yield compared(model, FOLDER, SIDE)


def unet(widths: Sequence[int], text: int = TEXT) -> Any:
    """Return a UNet with one layer a block, attention in all but the narrowest."""
    import diffusers

    library: Any = diffusers  # whose classes have no types
    attention = len(widths) - 1
    return library.UNet2DConditionModel(
        block_out_channels=tuple(widths),
        layers_per_block=1,
        cross_attention_dim=text,
        attention_head_dim=8,
        down_block_types=(*("CrossAttnDownBlock2D",) * attention, "DownBlock2D"),
        up_block_types=("UpBlock2D", *("CrossAttnUpBlock2D",) * attention),
    ).eval()


def compared(model: Any, folder: Path, side: int, rounds: int = ROUNDS) -> ResultRow:
    """Time steps of a UNet by every way.

    Args:
        model: the UNet in torch.
        folder: for the graphs.
        side: of the latents.
        rounds: of each.
    """
    values = sum(parameter.numel() for parameter in model.parameters())
    manifest = build(model, folder)
    inputs = random_inputs(model, side)
    steps = graph_steps(folder, manifest, inputs) | torch_steps(model, manifest, inputs)

    def sample(names: Sequence[str]) -> list[float]:
        return [seconds_of(steps[name]) for name in names]

    times = alternate(list(steps), sample, rounds, warm_up=1)
    best = {name: min(samples) for name, samples in times.samples.items()}
    return ResultRow(
        f"UNet of {values / 1e6:.0f} M values",
        {
            "side": side,
            "batch": BATCH,
            "sites": len(manifest.sites),
            "rank": RANK,
            "rounds": rounds,
        },
        {f"{name}, best, ms": value * 1e3 for name, value in best.items()},
        {f"{name} / {PLAIN}, best": best[name] / best[PLAIN] for name in steps if name != PLAIN}
        | {f"{name} / {PLAIN}": times.ratio(name, PLAIN) for name in steps if name != PLAIN},
    )


def build(model: Any, folder: Path) -> Manifest:
    """Trace a UNet and give the graph its LoRA inputs; reuse what is there."""
    import onnx_ir as ir

    from trt_lora.builder.graphs.read_graph import read_graph

    engine = folder / "engine"
    if not engine.exists():
        model.save_pretrained(folder / "unet")
        graph = read_graph(folder / "unet", "float32").model
        ir.save(graph, folder / "plain.onnx", external_data="plain.data")
        options: dict[str, Any] = {"flavour": "none", "max_lora_rank": RANK}
        build_engine(
            GraphConfig(folder / "plain.onnx", engine, target_modules=("all-linear",), **options)
        )
    return read_manifest(engine)


def random_inputs(model: Any, side: int) -> dict[str, torch.Tensor]:
    """Return latents at a real time step, and a text, by the names of the graph's inputs."""
    return {
        "sample": torch.randn(BATCH, model.config.in_channels, side, side),
        "timestep": torch.full((BATCH,), 981.0),
        "encoder_hidden_states": torch.randn(BATCH, TOKENS, model.config.cross_attention_dim),
    }


def graph_steps(
    folder: Path, manifest: Manifest, inputs: Mapping[str, torch.Tensor]
) -> dict[str, Step]:
    """Return the steps in ONNX Runtime, which the engine's runtime opens with the same options."""
    feeds: dict[str, Array] = {name: tensor.numpy() for name, tensor in inputs.items()}
    weights = random_weights(manifest, RANK)
    adapter = {name: tensor.numpy() for name, tensor in weights.items()}
    dummies = {
        name: np.zeros(site.shape(factor, 1), np.float32)
        for name, (site, factor) in manifest.lora_bindings.items()
    }
    plain, engine = session(folder / "plain.onnx"), session(folder / "engine" / ONNX_FILE)
    return {
        PLAIN: partial(plain.run, None, feeds),
        DUMMIES: partial(engine.run, None, feeds | dummies),
        ADAPTED: partial(engine.run, None, feeds | adapter),
    }


def session(path: Path) -> Any:
    """Open a graph on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def torch_steps(
    model: Any, manifest: Manifest, inputs: Mapping[str, torch.Tensor]
) -> dict[str, Step]:
    """Return the steps in torch."""
    from peft import LoraConfig, get_peft_model

    paths = [site.path for site in manifest.sites]
    config = LoraConfig(r=RANK, target_modules=paths, init_lora_weights=False)
    adapted: Any = get_peft_model(deepcopy(model), config).eval()
    return {
        DIFFUSERS: partial(model, **inputs, return_dict=False),
        PEFT: partial(adapted, **inputs, return_dict=False),
    }


def seconds_of(run: Step) -> float:
    """Call once."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
