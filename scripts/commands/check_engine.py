"""`trt-lora check`: verify the SHA-256 of an engine's files against its manifest."""

import argparse
import dataclasses
import sys
from pathlib import Path

from trt_lora.runtime.engines.engine_files import EngineFiles, compare_files
from trt_lora.runtime.manifest import Manifest, load_manifest
from trt_lora.scripts.terminal.console import print_table
from trt_lora.scripts.terminal.printing import byte_size, print_json
from trt_lora.scripts.terminal.stage_progress import stage_progress


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_check)


def _check(args: argparse.Namespace) -> None:
    """Print; exit with 1 if a file is missing or another than the manifest says."""
    manifest = load_manifest(args.engine)
    with stage_progress() as progress:
        sizes = [record.size_bytes for record in manifest.files.values()]
        progress.stage(f"reading {len(sizes)} files, {byte_size(sum(sizes))}")
        files = compare_files(args.engine, manifest)
    if args.json:
        print_json({"whole": not files.faults} | dataclasses.asdict(files))
    else:
        _print(args.engine, manifest, files)
    if files.faults:
        sys.exit(1)


def _print(directory: Path, manifest: Manifest, files: EngineFiles) -> None:
    faults = dict.fromkeys(files.left_out, "left out") | dict(files.faults)
    rows = [
        [name, str(record.size_bytes), faults.get(name, "as recorded")]
        for name, record in manifest.files.items()
    ]
    print_table(["file", "bytes", "found"], rows)
    if files.unlisted:
        print(f"not in the manifest, and not compared: {', '.join(map(repr, files.unlisted))}")
    count = len(files.faults)
    verdict = f"{count} of {len(rows)} files differ; copy or build it again" if count else "whole"
    print(f"{directory}: {verdict}")
