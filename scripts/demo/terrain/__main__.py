"""Demo of LoRA on pictures: an ONNX file of a diffusion model, two adapters, one engine."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.plugins.errors import ManifestError
from trt_lora.runtime import Engine, open_engine, read_manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.demo.terrain.model import ensure_terrain_model, noise
from trt_lora.scripts.demo.terrain.relief import save_rows
from trt_lora.scripts.terminal.build_progress import build_progress
from trt_lora.scripts.terminal.console import run

ENGINE = Path("engines/terrain")
ADAPTERS = Path("tests/terrain")
PICTURE = Path("build/terrain.png")
NOISE = noise(seed=5, difficulty=1.0)
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


def main() -> None:
    """Run the demo in the current folder, a checkout of the project."""
    argparse.ArgumentParser(prog="demo-pictures", description=__doc__).parse_args()
    run(lambda: demo(Console()))


def demo(console: Console) -> None:
    """Build the engine if need be, and draw what it makes of one noise.

    Raises:
        LoRAError: model, engine or an adapter cannot be made or read.
    """
    if not _is_built():
        with build_progress() as progress:
            progress.stage("model")
            build_engine(config(ensure_terrain_model(), ENGINE), progress)
    with open_engine(ENGINE) as engine:
        for path in sorted(ADAPTERS.iterdir()):
            engine.adapters.load(path.name, path)
        names = engine.adapters.names
        engine.adapters.blend("both", dict.fromkeys(names, 0.5))
        base = heights(engine)
        lands = {None: base} | {name: heights(engine, name) for name in engine.adapters.names}
        strip = {f"valleys x {s:g}": heights(engine, "valleys", s) for s in STRENGTHS}
        named = {name or "base model": land for name, land in lands.items()}
        save_rows(PICTURE, [_above(base.mean(), row) for row in (named, strip)], width=1024)
        same = "the same" if np.array_equal(heights(engine), base) else "OTHER"
        console.print(f"{ENGINE}: {len(engine.manifest.sites)} LoRA sites")
        console.print(f"the base model again, after all adapters: {same} bits")
        console.print(f"pictures: {PICTURE}")


def _above(middle: float, row: Mapping[str, Array]) -> list[tuple[str, Array]]:
    return [(name, land - middle) for name, land in row.items()]


def config(model: Path, engine: Path) -> GraphConfig:
    """Return the options of the engine, whose sites are those of the adapters."""
    adapters = tuple(sorted(ADAPTERS.iterdir()))
    most = 8  # so that both fit at once: ranks of a blend add up
    return GraphConfig(
        model, engine, lora_dirs=adapters, max_lora_rank=most, flavour="none", force=True
    )


def heights(engine: Engine, adapter: str | None = None, scale: float = 1.0) -> Array:
    """Return the map [128, 128] that the engine makes of NOISE."""
    land: Array = engine.run(NOISE, adapter=adapter, scale=scale)["denoised"][0, 0]
    return land


def _is_built() -> bool:
    try:
        return bool(read_manifest(ENGINE).sites)
    except ManifestError:
        return False


if __name__ == "__main__":
    main()
