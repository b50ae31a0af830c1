"""Table of the kernels that LoRA adds to an engine."""

from trt_lora.builder.tensorrt.build_log import Layout
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.terminal.console import print_table


def print_layouts(layouts: list[Layout], manifest: Manifest) -> None:
    """Print a table for every optimization profile that they were built for."""
    plain, *_ = layouts
    for index, profile in enumerate(manifest.profiles):
        if not plain.count(index):
            continue
        print_table(
            (profile, "kernels", "added", "added a layer", "copies of A and B", "streams"),
            [_row(layout, plain, index, manifest.layers) for layout in layouts],
        )


def _row(layout: Layout, plain: Layout, profile: int, layers: int) -> tuple[str, ...]:
    added = layout.count(profile) - plain.count(profile)
    copies = layout.pad_copies(profile) - plain.pad_copies(profile)
    streams = len({kernel.stream for kernel in layout.kernels if kernel.profile == profile})
    counts = (layout.count(profile), added, f"{added / layers:.1f}", copies, streams)
    return layout.name, *map(str, counts)
