"""The command `build-engine`: build an engine directory from a base model."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.builder.build import list_sites
from trt_lora.plugins.extras import extra
from trt_lora.runtime import Manifest
from trt_lora.scripts.terminal.adapters import warn_of_adapters
from trt_lora.scripts.terminal.build_options import build_config, build_parser
from trt_lora.scripts.terminal.config_file.print_config import config_text
from trt_lora.scripts.terminal.config_file.read_config import read_config
from trt_lora.scripts.terminal.console import run, warn
from trt_lora.scripts.terminal.site_report import print_sites
from trt_lora.scripts.terminal.stage_progress import stage_progress
from trt_lora.scripts.terminal.trtllm_options import without_trtllm_options


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `build-engine`."""
    words = _with_dashes(sys.argv[1:] if argv is None else argv)
    run(lambda: _main(_parsed(words)))


def _with_dashes(argv: Sequence[str]) -> list[str]:
    """TensorRT-LLM's command line writes options with underscores: --max_lora_rank."""
    return [_dashed(arg) if arg.startswith("--") else arg for arg in argv]


def _dashed(option: str) -> str:
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    kept, notes = without_trtllm_options(words)
    parser = build_parser()
    args = parser.parse_args(kept)
    if args.config is not None:
        values, more = read_config(args.config, parser)
        args, notes = parser.parse_args(kept, argparse.Namespace(**values)), notes + more
    for note in notes:
        warn(note)
    return args


def _main(args: argparse.Namespace) -> None:
    if args.print_config:
        print(config_text(build_parser(), args), end="")
        return
    config = build_config(args)
    if args.dry_run:
        print_sites(list_sites(config), verbose=args.verbose)
    else:
        _build(config)


def _build(config: BuildConfig) -> None:
    with extra("export", "building an engine"):
        import trt_lora.scripts.terminal.build_progress  # noqa: F401
    with stage_progress() as progress:
        manifest = build_engine(config, progress)
    print(_summary(manifest, config.output))
    warn_of_adapters(config.lora_dirs, manifest)


def _summary(manifest: Manifest, output: Path) -> str:
    size = sum(record.size_bytes for record in manifest.files.values())
    return (
        f"{output}: {len(manifest.sites)} LoRA sites, rank 1 to {manifest.max_lora_rank}, "
        f"{manifest.dtype}, {manifest.flavour}, {size / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
