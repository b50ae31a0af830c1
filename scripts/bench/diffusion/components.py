"""Components of pipelines: kernels that LoRA adds to their plans, and how long one takes to build.

Small random models, traced as `build-engine` does; TensorRT-RTX builds without a GPU.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.builder.graphs.trace_component import outline
from trt_lora.builder.progress import NoProgress
from trt_lora.builder.tensorrt.build_log import Layout
from trt_lora.builder.tensorrt.kernel_counts import kernel_layouts
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.bench.diffusion.small_components import MODELS, SD15
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.worker import Skipped

MAX_RANK = 64
DTYPES = ("float32", "float16", "bfloat16")
SIZES = {
    "batch": "1:2:4",
    "frames": "1:3:5",
    "height": "2:8:16",
    "width": "2:8:16",
    "patches": "16:64:256",
    "tokens": "4:77:128",
}


def kernel_rows(name: str, dtypes: Sequence[str] = DTYPES) -> Iterator[ResultRow]:
    """Count the kernels of a component without LoRA and with our plugin.

    Args:
        name: one of MODELS.
        dtypes: of its weights.

    Raises:
        Skipped: TensorRT-RTX is not installed.
    """
    if not TENSORRT_RTX.installed:
        raise Skipped(f"{TENSORRT_RTX.name} is not installed")
    for dtype in dtypes:
        with TemporaryDirectory() as scratch:
            engine = Path(scratch, "engine")
            manifest = build(MODELS[name](), Path(scratch, "model"), engine, dtype)
            layouts = kernel_layouts(engine, manifest, NoProgress())
            yield _row(f"{name}, {dtype}", manifest, next(layouts), next(layouts))


def build(model: Any, folder: Path, engine: Path, dtype: str) -> Manifest:
    """Build an engine for ONNX Runtime whose manifest has the profile that a plan would have.

    Args:
        model: one of MODELS, made.
        folder: for the model.
        engine: the directory to make.
        dtype: of the weights.
    """
    model.save_pretrained(folder)
    symbols = sorted(outline(folder).symbols)
    shapes = tuple(f"{symbol}={SIZES[symbol]}" for symbol in symbols)
    config = GraphConfig(
        folder,
        engine,
        ("all-linear",),
        max_lora_rank=MAX_RANK,
        shapes=shapes,
        flavour="none",
        dtype=dtype,
    )
    return build_engine(config)


def _row(name: str, manifest: Manifest, plain: Layout, plugin: Layout) -> ResultRow:
    sites = len(manifest.sites)
    kernels = {layout.name: layout.count(0) for layout in (plain, plugin)}
    added = plugin.count(0) - plain.count(0)
    copies = plugin.pad_copies(0) - plain.pad_copies(0)
    return ResultRow(
        name, {"sites": sites}, kernels, {"kernels a site": added / sites, "pad copies": copies}
    )


def build_rows() -> Iterator[ResultRow]:
    """Take a core's time for SD1.5's UNet, every block of it, from its folder to an engine."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = SD15()
        begin = process_time()
        manifest = build(model, folder / "model", folder / "engine", "float32")
        seconds = process_time() - begin
    yield ResultRow("SD1.5, all blocks", {"sites": len(manifest.sites)}, {"build, s": seconds})
