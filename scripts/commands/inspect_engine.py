"""`trt-lora inspect`: show the inputs and LoRA sites of an engine, and how an adapter fits it."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.extras import extra
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.manifest import Manifest, read_manifest
from trt_lora.scripts.terminal.adapters import hub_path
from trt_lora.scripts.terminal.console import print_table
from trt_lora.scripts.terminal.coverage_report import print_grid, print_tensors
from trt_lora.scripts.terminal.engine_facts import engine_facts
from trt_lora.scripts.terminal.printing import print_facts, print_json
from trt_lora.scripts.terminal.stage_progress import stage_progress

if TYPE_CHECKING:
    from trt_lora.builder.tensorrt.build_log import Layout


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    parser.add_argument("--adapter", type=Path, metavar="PATH", help="any format; nothing is run")
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="how many kernels LoRA adds, with and without the plugin; builds it four times",
    )
    parser.add_argument("--profile", metavar="NAME", help="with --kernels: of this profile alone")
    parser.add_argument(
        "--full", action="store_true", help="with --adapter: a line a tensor instead of a grid"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_inspect)


def _inspect(args: argparse.Namespace) -> None:
    """Print; exit with 1 if the engine would refuse the adapter."""
    if args.profile and not args.kernels:
        raise ConfigError("--profile is of --kernels, which is not there; pass both, or none")
    if args.full and not args.adapter:
        raise ConfigError("--full is of --adapter, which is not there; pass both, or none")
    manifest = read_manifest(args.engine)
    if args.kernels:
        _print_kernels(args.engine, manifest, args.profile, as_json=args.json)
        return
    coverage = None
    if args.adapter:
        adapter = load_adapter(hub_path(args.adapter), manifest)
        multiple = _reader(manifest)[1]
        fitted = fit_adapter(
            adapter, manifest, strict=False, rank_multiple=multiple, directory=args.engine
        )
        coverage = fitted.coverage
        log_warnings(coverage.source, coverage.warnings)
    if args.json:
        print_json(_as_json(manifest, coverage))
    elif coverage is None:
        print_facts(engine_facts(args.engine, manifest).items())
    else:
        (print_tensors if args.full else print_grid)(coverage, manifest)
        print(_summary(coverage, manifest))
    if coverage is not None and not coverage.is_taken:
        sys.exit(1)


def _print_kernels(
    directory: Path, manifest: Manifest, profile: str | None, *, as_json: bool
) -> None:
    with extra("export", "--kernels"):  # a machine that only serves engines need not have it
        from trt_lora.builder.tensorrt.kernel_counts import kernel_layouts
    with stage_progress() as progress:
        layouts = [*kernel_layouts(directory, manifest, progress, profile)]
    if as_json:
        print_json([dataclasses.asdict(layout) for layout in layouts])
    else:
        _print_layouts(layouts, manifest)


def _print_layouts(layouts: Sequence["Layout"], manifest: Manifest) -> None:
    """Print a table for every optimization profile that they were built for."""
    plain, *_ = layouts
    header = ("kernels", "added", "added a layer", "copies of A and B", "streams")
    for index, profile in enumerate(manifest.profiles):
        if plain.count(index):
            rows = [_layout_row(layout, plain, index, manifest.layers) for layout in layouts]
            print_table((profile, *header), rows)


def _layout_row(layout: "Layout", plain: "Layout", profile: int, layers: int) -> tuple[str, ...]:
    added = layout.count(profile) - plain.count(profile)
    copies = layout.pad_copies(profile) - plain.pad_copies(profile)
    streams = len({kernel.stream for kernel in layout.kernels if kernel.profile == profile})
    counts = (layout.count(profile), added, f"{added / layers:.1f}", copies, streams)
    return layout.name, *map(str, counts)


def _as_json(manifest: Manifest, coverage: Coverage | None) -> dict[str, Any]:
    if coverage is None:
        return dataclasses.asdict(manifest)
    executor, _ = _reader(manifest)
    return dataclasses.asdict(coverage) | {"bound": coverage.bound, "executor": executor}


def _reader(manifest: Manifest) -> tuple[str, int]:
    """Return the reader of this engine's adapters, and the multiple that ranks are padded to."""
    if manifest.flavour == "none":
        return "ONNX Runtime", 1
    return "TensorRT", manifest.rank_multiple


def _summary(coverage: Coverage, manifest: Manifest) -> str:
    executor, multiple = _reader(manifest)
    padding = f", ranks padded to multiples of {multiple}" if multiple > 1 else ""
    verdict = "the engine takes it" if coverage.is_taken else "the engine refuses it"
    return (
        f"{coverage.source}: {verdict}; {len(coverage.bound)} tensors bound, "
        f"{len(coverage.unexpected_keys)} not, {len(coverage.ignored)} ignored; "
        f"{len(coverage.adapted)} of {len(coverage.sites)} sites adapted, "
        f"{coverage.nbytes} bytes in {executor}{padding}"
    )
