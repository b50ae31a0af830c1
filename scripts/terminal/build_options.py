"""Command-line options of `build-engine`, without its heavy imports."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trt_lora.builder import config
from trt_lora.builder.config import BuildConfig
from trt_lora.builder.graphs.component_folder import MODEL_INDEX, is_component
from trt_lora.builder.graphs.config import GraphConfig
from trt_lora.builder.pipelines.config import PipelineConfig
from trt_lora.builder.pipelines.pipeline_folder import is_pipeline
from trt_lora.plugins.contract.sites import BindingNames
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.files.hub_cache import model_name
from trt_lora.scripts.terminal.adapters import hub_path
from trt_lora.scripts.terminal.command_parser import CommandParser, add_program_options

ENGINES = Path("engines")  # where an engine goes that has no --output


# The options that are fields of `BuildConfig` under the same name, with its defaults.
_FIELDS = (
    *("max_lora_rank", "lora_mode", "max_loras", "lora_vectors"),
    *("max_batch_size", "max_input_len", "max_seq_len", "max_source_len"),
    *("dtype", "flavour", "lora_plugin", "lora_streams", "timing_cache", "calibration"),
    *("quantize", "quantize_head", "quantize_block", "quantize_level"),
)
_OF_GRAPHS = ("shapes", "batch", "path_prefix", "site_map")  # fields of `GraphConfig` alone
_OF_PIPELINES = ("components",)


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        prog="build-engine",
        description="Build an engine directory from a base model: ONNX with LoRA inputs, "
        "TensorRT plan, manifest.",
        allow_abbrev=False,
    )
    add = parser.add_argument
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
    _add_directories(add)
    _add_graph_options(add)
    _add_lora_options(add)
    _add_engine_options(add)
    _add_code_options(add)
    add("--json", action="store_true", help="print one JSON object instead, also of --dry-run")
    add_program_options(parser)
    return parser


def build_config(args: argparse.Namespace) -> BuildConfig | GraphConfig:
    """Return what the parsed options ask for.

    Raises:
        ConfigError: there is no model, the hub does not have it, a value is out of its range, an
            option is not of its kind of model, or nothing says which modules take LoRA.
    """
    if args.onnx is not None:
        _refuse_options(
            args, ("model", "revision", "dtype"), "a model's folder, and --onnx is a graph"
        )
        _refuse_options(args, _OF_PIPELINES, "a pipeline, and --onnx is one graph")
        return _graph_config(args, args.onnx)
    if args.model is None:
        raise ConfigError("nothing says which model to build; pass --model DIR or --onnx FILE")
    model = hub_path(args.model, args.revision)
    _refuse_options(args, _OF_PIPELINES, f"a pipeline, and {model} has no {MODEL_INDEX}")
    if is_component(model):
        return _graph_config(args, model)
    _refuse_options(args, _OF_GRAPHS, "--onnx, which is not there")
    values: dict[str, Any] = {name: getattr(args, name) for name in _FIELDS}
    return BuildConfig(
        model=model,
        output=args.output or _named_output(model),
        target_modules=tuple(args.lora_target_modules),
        lora_dirs=tuple(map(hub_path, args.lora_dir)),
        compute_capability=tuple(args.compute_capability),
        binding_names=BindingNames(args.binding_names),
        lora_saved_modules=_names(args.lora_saved_modules),
        force=bool(args.force),
        **values,
    )


def _named_output(model: Path) -> Path:
    """Where the engine of a whole model goes by default: by its name, here or on the hub."""
    return ENGINES / model_name(model.resolve()).rpartition("/")[2]


def _names(given: Iterable[str]) -> tuple[str, ...]:
    """Names that have commas or spaces between them."""
    return tuple(name for names in given for name in names.split(",") if name)


def pipeline_config(args: argparse.Namespace) -> PipelineConfig | None:
    """Return what the parsed options ask for, if it is a diffusers pipeline.

    Raises:
        ConfigError: the hub does not have it, or as `build_config`.
    """
    if args.model is None or args.onnx is not None:
        return None
    model = hub_path(args.model, args.revision)
    if not is_pipeline(model):
        return None
    config = _graph_config(args, model)
    if args.output is None:
        config = replace(config, output=_named_output(model))
    return PipelineConfig(config, _names(args.components))


def _graph_config(args: argparse.Namespace, graph: Path) -> GraphConfig:
    own = {field.name for field in fields(GraphConfig)}
    others = [name for name in sorted(_FIELDS) if name not in own]
    others.append("lora_saved_modules")
    _refuse_options(args, others, "language models, and this is a graph")
    return GraphConfig(
        onnx=graph,
        output=args.output or ENGINES / (graph.stem if graph.is_file() else graph.name),
        target_modules=tuple(args.lora_target_modules),
        lora_dirs=tuple(map(hub_path, args.lora_dir)),
        max_lora_rank=args.max_lora_rank,
        max_loras=args.max_loras,
        batch=args.batch,
        shapes=tuple(args.shapes),
        path_prefix=args.path_prefix,
        site_map=args.site_map,
        dtype=args.dtype,
        flavour=args.flavour,
        lora_plugin=args.lora_plugin,
        binding_names=BindingNames(args.binding_names),
        compute_capability=tuple(args.compute_capability),
        timing_cache=args.timing_cache,
        force=bool(args.force),
    )


def _refuse_options(args: argparse.Namespace, names: Iterable[str], whose: str) -> None:
    """Refuse options with another value than their default."""
    for name in names:
        default = getattr(BuildConfig if name in _FIELDS else GraphConfig, name, None)
        value = getattr(args, name)
        if value != default and (value or default):  # a list of none is no tuple of none
            raise ConfigError(f"--{name.replace('_', '-')} {value} is of {whose}; leave one out")


def _add_graph_options(add: Callable[..., object]) -> None:
    add(
        "--onnx",
        type=Path,
        metavar="FILE",
        help="an ONNX graph by any exporter, in the place of --model",
    )
    add(
        "--shapes",
        nargs="+",
        default=[],
        metavar="NAME=SIZES",
        help="with --onnx: smallest, usual and largest size of a dynamic dimension of the plan, "
        "such as batch=1:2:8; h=64 is one size, and a dimension 8*h is eight times h",
    )
    add(
        "--batch",
        default=GraphConfig.batch,
        metavar="NAME",
        help="with --onnx and --max-loras: name of the dimension whose entries are rows, each with "
        "its own adapter (default: batch or batch_size)",
    )
    add(
        "--path-prefix",
        default=GraphConfig.path_prefix,
        metavar="PATH",
        help="with --onnx: in front of every module path, such as model.encoder",
    )
    add(
        "--site-map",
        type=Path,
        metavar="FILE",
        help="with --onnx: JSON of paths to rename, and of widths of fused linears' parts",
    )
    add(
        "--components",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of a diffusers pipeline: those to build, such as unet text_encoder (default: all "
        "that take LoRA)",
    )


def _add_directories(add: Callable[..., object]) -> None:
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="directory of a transformers language model, a diffusers pipeline or one component "
        "of it, or its name on the hub: org/name",
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


def _add_number(add: Callable[..., object], option: str, unit: str, what: str) -> None:
    add(option, type=int, default=_default(option), metavar=unit, help=what)


def _add_choice(
    add: Callable[..., object], option: str, choices: tuple[str, ...], what: str
) -> None:
    add(option, choices=choices, default=_default(option), help=what)


def _default(option: str) -> object:
    return getattr(BuildConfig, option.removeprefix("--").replace("-", "_"))


def _add_lora_options(add: Callable[..., object]) -> None:
    add(
        "--lora-target-modules",
        nargs="+",
        default=BuildConfig.target_modules,
        metavar="MODULE",
        help="attn_q, mlp_gate, ..., Hugging Face names such as q_proj, or all-linear; of a graph, "
        "ends of its paths such as ff.net.0.proj (default: the modules of --lora-dir)",
    )
    add(
        "--lora-dir",
        nargs="+",
        type=Path,
        default=BuildConfig.lora_dirs,
        metavar="DIR",
        help="real adapters: the engine gets their modules, largest rank and commonest rank",
    )
    _add_number(
        add,
        "--max-lora-rank",
        "RANK",
        "largest rank an adapter may have (default: that of --lora-dir, else "
        f"{config.DEFAULT_MAX_LORA_RANK})",
    )
    _add_choice(
        add,
        "--lora-mode",
        config.LORA_MODE_CHOICES,
        "one adapter for all rows of a batch (single), or one for each (slots) "
        "(default: slots where --max-loras is given, else single)",
    )
    _add_number(
        add,
        "--max-loras",
        "SLOTS",
        "adapters in one batch, each row with its own (default: 0, which is one adapter for "
        f"all rows; {config.DEFAULT_MAX_LORAS} with --lora-mode slots)",
    )
    add(
        "--lora-vectors",
        action=argparse.BooleanOptionalAction,
        default=BuildConfig.lora_vectors,
        help="every linear takes a scale and a bias too, for adapters with DoRA or lora_bias; all "
        "adapters pay one or two kernels a layer for it",
    )
    add(
        "--lora-saved-modules",
        nargs="+",
        default=BuildConfig.lora_saved_modules,
        metavar="MODULE",
        help="lm_head, embed_tokens or both take LoRA, and a whole matrix of PEFT's "
        "modules_to_save too, which is as large as the base model's own",
    )
    add(
        "--binding-names",
        choices=[each.value for each in BindingNames],
        default=BuildConfig.binding_names.value,
        help="spelling of the LoRA inputs; edgellm is TensorRT-Edge-LLM's (default: %(default)s)",
    )


def _add_engine_options(add: Callable[..., object]) -> None:
    _add_number(add, "--max-batch-size", "ROWS", "sequences at a time (default: %(default)s)")
    _add_number(
        add,
        "--max-input-len",
        "TOKENS",
        f"tokens of a prompt that one step takes (default: {config.DEFAULT_MAX_INPUT_LEN}, or "
        "--max-seq-len if that is less)",
    )
    _add_number(
        add,
        "--max-seq-len",
        "TOKENS",
        f"tokens of prompt and answer together (default: {config.DEFAULT_MAX_SEQ_LEN}, or twice "
        "--max-input-len if that is more, or the model's positions if those are fewer)",
    )
    _add_number(
        add,
        "--max-source-len",
        "TOKENS",
        "tokens of a source, of an encoder-decoder (default: "
        f"{config.DEFAULT_MAX_SOURCE_LEN}, or the model's positions if those are fewer)",
    )
    _add_choice(add, "--dtype", config.DTYPES, "of weights and activations (default: %(default)s)")
    what = "auto takes what is installed; none makes the ONNX file only (default: %(default)s)"
    _add_choice(add, "--flavour", config.FLAVOUR_CHOICES, what)
    _add_choice(
        add,
        "--lora-plugin",
        config.PLUGIN_CHOICES,
        "plugin: one kernel of ours for linears that read one x; native: matrix products of "
        "TensorRT's; aot: the plugin inside the plan, so that it runs without Python (full "
        "TensorRT 10.10 or newer); auto: plugin where the flavour can, else native "
        "(default: %(default)s)",
    )
    _add_number(
        add,
        "--lora-streams",
        "STREAMS",
        "of a plan with the plugin: 2 lets LoRA run beside the matrix products that it adds to, "
        "for one kernel a step more; 1 behind them (default: %(default)s)",
    )
    add(
        "--compute-capability",
        nargs="+",
        default=[],
        metavar="X.Y",
        help="GPUs that a plan of TensorRT-RTX is for, such as 8.9 12.0 (default: all that it has)",
    )
    add(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="reuse kernel timings between builds (full TensorRT; TensorRT-RTX has none)",
    )


def _add_code_options(add: Callable[..., object]) -> None:
    kinds = tuple(config.QUANTIZED_BITS)
    what = "weights of linears in codes of 8 or 4 bits; fp8 in a plan alone (default: %(default)s)"
    _add_choice(add, "--quantize", kinds, what)
    what = "the same of the output head, with --quantize (default: %(default)s)"
    _add_choice(add, "--quantize-head", config.QUANTIZED_HEADS, what)
    what = "values that share a scale: 16, 32, 64, 128 or 256 (default: %(default)s)"
    _add_number(add, "--quantize-block", "VALUES", what)
    what = (
        "products with activations in 8 bits (fast; in a plan of fp8 alone) or as they are (exact) "
        "(default: %(default)s)"
    )
    _add_choice(add, "--quantize-level", config.QUANTIZE_LEVELS, what)
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="a text like those that the engine will see, for --quantize int4 or fp8 (default: "
        "one that comes with the package)",
    )
