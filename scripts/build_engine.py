"""The command `build-engine`: build an engine directory from a base model."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from trt_lora.builder import BuildConfig, GraphConfig, PipelineConfig, build_engine, build_pipeline
from trt_lora.builder.build import list_sites
from trt_lora.builder.pipelines.build_pipeline import list_pipeline_sites
from trt_lora.plugins.extras import extra
from trt_lora.runtime import Manifest
from trt_lora.scripts.terminal.adapters import previewed
from trt_lora.scripts.terminal.build_options import build_config, build_parser, pipeline_config
from trt_lora.scripts.terminal.config_file import config_text, read_config
from trt_lora.scripts.terminal.console import note, run
from trt_lora.scripts.terminal.printing import print_json
from trt_lora.scripts.terminal.site_report import print_sites, sites_as_json
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
    if notes:
        note("; ".join(notes))
    return args


def _main(args: argparse.Namespace) -> None:
    if args.print_config:
        print(config_text(build_parser(), args), end="")
        return
    if pipeline := pipeline_config(args):
        _pipeline(pipeline, args)
        return
    config = build_config(args)
    if args.dry_run:
        listing = list_sites(config)
        if args.json:
            print_json(sites_as_json(listing))
        else:
            print_sites(listing, verbose=args.verbose)
    else:
        _build(config, as_json=args.json)


def _pipeline(config: PipelineConfig, args: argparse.Namespace) -> None:
    """Build the engines of a pipeline, or list their sites, a component after the other."""
    if args.dry_run:
        listings = list_pipeline_sites(config)
        if args.json:
            print_json({name: sites_as_json(listing) for name, listing in listings.items()})
            return
        for name, listing in listings.items():
            print(f"{name}:")
            print_sites(listing, verbose=args.verbose)
        return
    with stage_progress() as progress:
        manifests, output = build_pipeline(config, progress), config.graph.output
    if args.json:
        print_json({name: _as_json(each, output / name) for name, each in manifests.items()})
    else:
        print("\n".join(_summary(each, output / name) for name, each in manifests.items()))


def _build(config: BuildConfig | GraphConfig, *, as_json: bool) -> None:
    with extra("export", "building an engine"):
        import trt_lora.scripts.terminal.build_progress  # noqa: F401
    with stage_progress() as progress:
        manifest = build_engine(config, progress)
    if as_json:
        print_json(_as_json(manifest, config.output))
    else:
        print(_summary(manifest, config.output))
    for path in config.lora_dirs:
        previewed(path, manifest)  # its warnings


def _as_json(manifest: Manifest, output: Path) -> dict[str, object]:
    return {
        "output": str(output),
        "sites": len(manifest.sites),
        "max_lora_rank": manifest.max_lora_rank,
        "max_loras": manifest.max_loras,
        "dtype": manifest.dtype,
        "flavour": manifest.flavour,
        "size_bytes": _size(manifest),
    }


def _size(manifest: Manifest) -> int:
    return sum(record.size_bytes for record in manifest.files.values())


def _summary(manifest: Manifest, output: Path) -> str:
    return (
        f"{output}: {len(manifest.sites)} LoRA sites, rank 1 to {manifest.max_lora_rank}, "
        f"{manifest.dtype}, {manifest.flavour}, {_size(manifest) / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
