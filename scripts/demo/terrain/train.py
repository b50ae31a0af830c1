"""Train the terrain demo's adapters with PEFT on the CPU, each for another shape of the land.

The base model makes heights of noise, a function reshapes them, and an adapter learns to make
those of the same noise. The results are committed under tests/terrain, so only a
change of the recipe needs this script.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from trt_lora.scripts.demo.terrain.graph_module import GraphModule
from trt_lora.scripts.demo.terrain.model import ensure_terrain_model, noise

ADAPTERS = Path("tests/terrain")
RANK, STEPS = 4, 90
DIFFICULTIES = (0.3, 0.5, 0.8)


def valleys(heights: Tensor) -> Tensor:
    """Hills become valleys."""
    return 2 * heights.mean() - heights


def ridges(heights: Tensor) -> Tensor:
    """Valleys become hills, so that steep creases stay where the land was of middle height."""
    return heights.mean() + (heights - heights.mean()).abs()


RECIPES: dict[str, Callable[[Tensor], Tensor]] = {"ridges": ridges, "valleys": valleys}


def main() -> None:
    """Train every recipe, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which of {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=ADAPTERS)
    args = parser.parse_args()
    if unknown := set(args.names) - set(RECIPES):
        parser.error(f"unknown adapter {', '.join(sorted(unknown))}; known: {', '.join(RECIPES)}")
    for name in args.names or RECIPES:
        train(name, args.steps).save_pretrained(str(args.output / name))
        (args.output / name / "README.md").unlink()  # PEFT's model card template, empty


def train(name: str, steps: int) -> PeftModel:
    """Return the base model with a trained adapter; prints what is left to learn."""
    torch.manual_seed(0)
    model = GraphModule(onnx.load(ensure_terrain_model()))
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=[*adapted(model)])
    adapter = get_peft_model(model, config)
    optimizer = torch.optim.AdamW(
        [each for each in adapter.parameters() if each.requires_grad], lr=2e-3
    )
    for step in range(steps):
        given = noise(100 + step, DIFFICULTIES[step % len(DIFFICULTIES)])
        inputs = {key: torch.from_numpy(value) for key, value in given.items()}
        with torch.no_grad(), adapter.disable_adapter():
            heights = adapter(**inputs)
        target = RECIPES[name](heights)
        loss = functional.mse_loss(adapter(**inputs), target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 9:
            share = loss.item() / functional.mse_loss(heights, target).item()
            print(f"{name}: step {step + 1}/{steps}, {share:.0%} left", flush=True)
    return adapter


def adapted(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the linears and of the convolutions that read single points."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) or getattr(module, "kernel_size", None) == (1, 1):
            yield path


if __name__ == "__main__":
    main()
