"""Command-line options of `build-engine`, without its heavy imports."""

import argparse
from collections.abc import Callable
from pathlib import Path

from trt_lora.builder.config import (
    DEFAULT_MAX_INPUT_LEN,
    DEFAULT_MAX_LORA_RANK,
    DEFAULT_MAX_LORAS,
    DEFAULT_MAX_SEQ_LEN,
    DTYPES,
    FLAVOUR_CHOICES,
    LORA_MODE_CHOICES,
    PLUGIN_CHOICES,
    BuildConfig,
)
from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.files.hub_cache import model_name
from trt_lora.scripts.terminal.adapters import hub_path
from trt_lora.scripts.terminal.command_parser import CommandParser, add_program_options

ENGINES = Path("engines")  # where an engine goes that has no --output


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="build-engine",
        description="Build an engine directory from a base model: ONNX with LoRA inputs, "
        "TensorRT plan, manifest.",
        allow_abbrev=False,
    )
    _add_config_file(parser.add_argument)
    _add_directories(parser.add_argument)
    _add_lora_options(parser.add_argument)
    _add_sizes(parser.add_argument)
    _add_engine_options(parser.add_argument)
    _add_json(parser.add_argument)
    add_program_options(parser)
    return parser


def build_config(args: argparse.Namespace) -> BuildConfig:
    """Return what the parsed options ask for.

    Raises:
        ConfigError: there is no model, the hub does not have it, a value is out of its range, or
            nothing says which modules take LoRA.
    """
    if args.model is None:
        raise ConfigError("nothing says which model to build; pass --model DIR")
    model = hub_path(args.model, args.revision)
    return BuildConfig(
        model=model,
        output=args.output or ENGINES / model_name(model.resolve()).rpartition("/")[2],
        target_modules=tuple(args.lora_target_modules),
        lora_dirs=tuple(map(hub_path, args.lora_dir)),
        max_lora_rank=args.max_lora_rank,
        lora_mode=args.lora_mode,
        max_loras=args.max_loras,
        max_batch_size=args.max_batch_size,
        max_input_len=args.max_input_len,
        max_seq_len=args.max_seq_len,
        dtype=args.dtype,
        flavour=args.flavour,
        lora_plugin=args.lora_plugin,
        binding_names=BindingNames(args.binding_names),
        timing_cache=args.timing_cache,
        force=bool(args.force),
    )


def _add_directories(add: Callable[..., object]) -> None:
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="directory of a transformers causal language model, or its name on the hub: org/name",
    )
    add("--revision", help="of a model on the hub: a branch, tag or commit")
    add(
        "--output",
        "--output-dir",
        type=Path,
        metavar="DIR",
        help=f"engine directory to make (default: {ENGINES}/ and the name of the model's)",
    )
    _add_flag(add, "--force", "replace an engine that stands at --output")
    _add_flag(
        add,
        "--dry-run",
        "list where LoRA goes, a line a kind of linear, and what is left alone and why; read "
        "no weight, write nothing",
    )
    _add_flag(add, "--verbose", "with --dry-run: a line a linear")


def _add_flag(add: Callable[..., object], option: str, what: str) -> None:
    """Add a flag that the command line can also take back, where a file has set it."""
    add(option, action=argparse.BooleanOptionalAction, help=what)


def _add_config_file(add: Callable[..., object]) -> None:
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file of options by their long names; the command line wins over it",
    )
    add(
        "--print-config",
        action="store_true",
        help="print such a file, with every option and the value it has here, and build nothing",
    )


def _add_json(add: Callable[..., object]) -> None:
    add("--json", action="store_true", help="print one JSON object instead, also of --dry-run")


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
        help="largest rank an adapter may have (default: that of --lora-dir, else "
        f"{DEFAULT_MAX_LORA_RANK})",
    )
    add(
        "--lora-mode",
        choices=LORA_MODE_CHOICES,
        default=BuildConfig.lora_mode,
        help="one adapter for all rows of a batch (single), or one for each (slots) "
        "(default: slots where --max-loras is given, else single)",
    )
    add(
        "--max-loras",
        type=int,
        default=BuildConfig.max_loras,
        metavar="SLOTS",
        help="adapters in one batch, each row with its own (default: 0, which is one adapter for "
        f"all rows; {DEFAULT_MAX_LORAS} with --lora-mode slots)",
    )
    add(
        "--binding-names",
        choices=[names.value for names in BindingNames],
        default=BuildConfig.binding_names.value,
        help="spelling of the LoRA inputs; edgellm is TensorRT-Edge-LLM's (default: %(default)s)",
    )


def _add_sizes(add: Callable[..., object]) -> None:
    add(
        "--max-batch-size",
        type=int,
        default=BuildConfig.max_batch_size,
        metavar="ROWS",
        help="sequences at a time (default: %(default)s)",
    )
    add(
        "--max-input-len",
        type=int,
        default=BuildConfig.max_input_len,
        metavar="TOKENS",
        help=f"tokens of a prompt that one step takes (default: {DEFAULT_MAX_INPUT_LEN}, or "
        "--max-seq-len if that is less)",
    )
    add(
        "--max-seq-len",
        type=int,
        default=BuildConfig.max_seq_len,
        metavar="TOKENS",
        help=f"tokens of prompt and answer together (default: {DEFAULT_MAX_SEQ_LEN}, or twice "
        "--max-input-len if that is more, or the model's positions if those are fewer)",
    )


def _add_engine_options(add: Callable[..., object]) -> None:
    add(
        "--dtype",
        choices=DTYPES,
        default=BuildConfig.dtype,
        help="of weights and activations (default: %(default)s)",
    )
    add(
        "--flavour",
        choices=FLAVOUR_CHOICES,
        default=BuildConfig.flavour,
        help="auto takes what is installed; none makes the ONNX file only (default: %(default)s)",
    )
    add(
        "--lora-plugin",
        choices=PLUGIN_CHOICES,
        default=BuildConfig.lora_plugin,
        help="plugin: one kernel of ours for linears that read one x; native: matrix products of "
        "TensorRT's; aot: the plugin inside the plan, so that it runs without Python (full "
        "TensorRT 10.10 or newer); auto: plugin where the flavour can, else native "
        "(default: %(default)s)",
    )
    add(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="reuse kernel timings between builds (full TensorRT; TensorRT-RTX has none)",
    )
