"""Build an engine directory from a base model: ONNX with LoRA inputs, TensorRT plan, manifest."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.builder.build import list_sites
from trt_lora.builder.config import DEFAULT_MAX_LORA_RANK, DTYPES, FLAVOUR_CHOICES, PLUGIN_CHOICES
from trt_lora.builder.insert_lora import InsertLoRAResult
from trt_lora.plugins.contract import BindingNames
from trt_lora.runtime import Manifest
from trt_lora.scripts.adapter_arguments import warn_of_adapters
from trt_lora.scripts.build_progress import build_progress
from trt_lora.scripts.console import run


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `build-engine`."""
    args = _parser().parse_args(_with_dashes(sys.argv[1:] if argv is None else argv))
    run(lambda: _build(args))


def _with_dashes(argv: Sequence[str]) -> list[str]:
    """TensorRT-LLM's command line writes options with underscores: --max_lora_rank."""
    return [_dashed(arg) if arg.startswith("--") else arg for arg in argv]


def _dashed(option: str) -> str:
    name, equals, value = option.partition("=")
    return name.replace("_", "-") + equals + value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="build-engine",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_directories(parser.add_argument)
    _add_lora_options(parser.add_argument)
    _add_engine_options(parser.add_argument)
    return parser


def _add_directories(add: Callable[..., object]) -> None:
    add(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of a transformers causal language model",
    )
    add("--output", "--output-dir", type=Path, metavar="DIR", help="engine directory to make")
    add("--force", action="store_true", help="replace an engine that stands at --output")
    add(
        "--dry-run",
        action="store_true",
        help="list the sites and what would be left alone and why; write nothing",
    )


def _add_lora_options(add: Callable[..., object]) -> None:
    add(
        "--lora-target-modules",
        nargs="+",
        default=BuildConfig.target_modules,
        metavar="MODULE",
        help="attn_q, mlp_gate, ..., Hugging Face names such as q_proj, or all-linear "
        "(default: the modules of --lora-dir)",
    )
    add(
        "--lora-dir",
        nargs="+",
        type=Path,
        default=BuildConfig.lora_dirs,
        metavar="DIR",
        help="real adapters: the engine gets their modules, largest rank and commonest rank",
    )
    add(
        "--max-lora-rank",
        type=int,
        default=BuildConfig.max_lora_rank,
        metavar="RANK",
        help=f"largest rank an adapter may have (default: that of --lora-dir, else "
        f"{DEFAULT_MAX_LORA_RANK})",
    )
    add(
        "--binding-names",
        choices=[names.value for names in BindingNames],
        default=BuildConfig.binding_names.value,
        help="spelling of the LoRA inputs; edgellm is TensorRT-Edge-LLM's",
    )


def _add_engine_options(add: Callable[..., object]) -> None:
    add(
        "--max-batch-size", type=int, default=BuildConfig.max_batch_size, help="sequences at a time"
    )
    add("--max-input-len", type=int, default=BuildConfig.max_input_len, help="tokens of a prompt")
    add(
        "--max-seq-len",
        type=int,
        default=BuildConfig.max_seq_len,
        help="tokens of prompt and answer together",
    )
    add("--dtype", choices=DTYPES, default=BuildConfig.dtype, help="of weights and activations")
    add(
        "--flavour",
        choices=FLAVOUR_CHOICES,
        default=BuildConfig.flavour,
        help="auto takes what is installed; none makes the ONNX file only",
    )
    add(
        "--lora-plugin",
        choices=PLUGIN_CHOICES,
        default=BuildConfig.lora_plugin,
        help="plugin: one kernel of ours for linears that read one x; native: matrix products of "
        "TensorRT's; aot: the plugin inside the plan, so that it runs without Python (full "
        "TensorRT 10.10 or newer); auto: plugin where the flavour can, else native",
    )
    add(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="reuse kernel timings between builds (full TensorRT; TensorRT-RTX has none)",
    )


def _build(args: argparse.Namespace) -> None:
    config = BuildConfig(
        model=args.model,
        output=args.output or Path("engines") / args.model.resolve().name,
        target_modules=tuple(args.lora_target_modules),
        lora_dirs=tuple(args.lora_dir),
        max_lora_rank=args.max_lora_rank,
        max_batch_size=args.max_batch_size,
        max_input_len=args.max_input_len,
        max_seq_len=args.max_seq_len,
        dtype=args.dtype,
        flavour=args.flavour,
        lora_plugin=args.lora_plugin,
        binding_names=BindingNames(args.binding_names),
        timing_cache=args.timing_cache,
        force=args.force,
    )
    with build_progress() as progress:
        if args.dry_run:
            report = _sites(list_sites(config, progress))
        else:
            manifest = build_engine(config, progress)
            report = _summary(manifest, config.output)
            warn_of_adapters(config.lora_dirs, manifest)
    print(report)


def _sites(result: InsertLoRAResult) -> str:
    lines = [
        f"{site.path}  {site.module.name if site.module else '-'}  k={site.k} n={site.n}"
        for site in result.sites
    ]
    lines += [f"left alone: {item.path}: {item.reason}" for item in result.left_alone]
    return "\n".join([*lines, f"{len(result.sites)} sites, {len(result.left_alone)} left alone"])


def _summary(manifest: Manifest, output: Path) -> str:
    size = sum(record.size_bytes for record in manifest.files.values())
    return (
        f"{output}: {len(manifest.sites)} LoRA sites, rank 1 to {manifest.max_lora_rank}, "
        f"{manifest.dtype}, {manifest.flavour}, {size / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
