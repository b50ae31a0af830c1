"""Table of the kernels that LoRA adds to an engine."""

from trt_lora.builder.tensorrt.kernel_counts import Layout
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.terminal.console import print_table


def print_layouts(layouts: list[Layout], manifest: Manifest) -> None:
    """Print a table for every optimization profile."""
    plain, *_ = layouts
    layers = len({site.layer for site in manifest.sites if site.layer is not None}) or 1
    for index, profile in enumerate(manifest.profiles):
        print_table(
            (profile, "kernels", "added", "added a layer", "copies of A and B", "streams"),
            [_row(layout, plain, index, layers) for layout in layouts],
        )


def _row(layout: Layout, plain: Layout, profile: int, layers: int) -> tuple[str, ...]:
    added = layout.count(profile) - plain.count(profile)
    copies = layout.pad_copies(profile) - plain.pad_copies(profile)
    streams = len({kernel.stream for kernel in layout.kernels if kernel.profile == profile})
    counts = (layout.count(profile), added, f"{added / layers:.1f}", copies, streams)
    return layout.name, *map(str, counts)
