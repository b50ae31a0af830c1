"""Charts of the kernels of an engine's layouts, from what `inspect --kernels --json` printed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_lora.builder.tensorrt.build_log import Kernel
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.files.json_file import check_types, read_json_list
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.report.bars import Bar, Chart

_MAX_BYTES = 64 << 20  # a hundred layers in four layouts


@dataclass(frozen=True)
class LayoutKernels:
    """What one layout of an engine runs."""

    name: str
    kernels: tuple[Kernel, ...]

    def of_profile(self, profile: int) -> tuple[Kernel, ...]:
        """Return the kernels of an optimization profile."""
        return tuple(kernel for kernel in self.kernels if kernel.profile == profile)

    def pad_copies(self, profile: int) -> int:
        """Return how many of them copy a tensor to pad it."""
        return sum(kernel.is_pad_copy for kernel in self.of_profile(profile))


def kernel_charts(path: Path, manifest: Manifest) -> tuple[Chart, ...]:
    """Return a chart for each optimization profile; the first layout is the one without LoRA.

    Raises:
        AdapterError: the file cannot be read, or holds no list.
        ConfigError: it is not what the command prints.
    """
    items = read_json_list(path, _MAX_BYTES)
    try:
        layouts = tuple(map(_layout, items))
        for layout in layouts:
            check_types(layout, LayoutKernels, "layout")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not what `trt-lora inspect ENGINE --kernels --json` prints: {error!s:.300}"
        ) from error
    layers = len({site.layer for site in manifest.sites if site.layer is not None}) or 1
    return tuple(
        Chart(
            f"Kernels, profile {name}",
            tuple(_bar(layout, layouts[0], number, layers) for layout in layouts),
        )
        for number, name in enumerate(manifest.profiles)
    )


def _layout(item: Mapping[str, Any]) -> LayoutKernels:
    return LayoutKernels(item["name"], tuple(Kernel(**kernel) for kernel in item["kernels"]))


def _bar(layout: LayoutKernels, plain: LayoutKernels, profile: int, layers: int) -> Bar:
    count, before = len(layout.of_profile(profile)), len(plain.of_profile(profile))
    text = f"{count}"
    if layout is not plain:
        copies = layout.pad_copies(profile) - plain.pad_copies(profile)
        text += f" (+{count - before}, {(count - before) / layers:.1f} a layer"
        text += f", {copies} copies of A and B)" if copies else ")"
    return Bar(layout.name, count, text, layout.name == "plugin")
