"""Charts of the kernels of an engine's layouts, from what `inspect --kernels --json` printed."""

from pathlib import Path

from trt_lora.builder.tensorrt.build_log import Layout
from trt_lora.plugins.checked import typed
from trt_lora.runtime.files.json_file import read_json_as
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.measuring.benchmark import made_by
from trt_lora.scripts.report.bars import Bar, Chart

_MAX_BYTES = 64 << 20  # a hundred layers in four layouts


def kernel_charts(path: Path, manifest: Manifest) -> tuple[Chart, ...]:
    """Return a chart for each optimization profile; the first layout is the one without LoRA.

    Raises:
        AdapterError: the file cannot be read, or holds no list.
        ConfigError: it is not what the command prints.
    """
    items = read_json_as(list, path, _MAX_BYTES)
    with made_by("trt-lora inspect ENGINE --kernels --json", path):
        layouts: tuple[Layout, ...] = typed(tuple[Layout, ...], items, "layout")
        plain, *_ = layouts
    return tuple(
        Chart(
            f"Kernels, profile {name}",
            tuple(_bar(layout, plain, number, manifest.layers) for layout in layouts),
        )
        for number, name in enumerate(manifest.profiles)
        if plain.count(number)
    )


def _bar(layout: Layout, plain: Layout, profile: int, layers: int) -> Bar:
    count, before = layout.count(profile), plain.count(profile)
    text = f"{count}"
    if layout is not plain:
        copies = layout.pad_copies(profile) - plain.pad_copies(profile)
        text += f" (+{count - before}, {(count - before) / layers:.1f} a layer"
        text += f", {copies} copies of A and B)" if copies else ")"
    return Bar(layout.name, count, text, layout.name == "plugin")
