"""Adapt the parsed options of `polygraphy run` to an engine.

1. The data loader is ours, unless inputs are loaded from elsewhere (`data_args.py`).
2. `--trt` builds with one profile that holds all of the manifest's, because its runner cannot
   change profiles between iterations; and strongly typed, as the engine is.
3. Without a GPU, what needs TensorRT is an error, or replaced by the float64 reference if that is
   asked for.
4. What is compared, and how closely, depends on the runners and the engine
   (`outputs.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polygraphy
from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import (
    ModelArgs,
    OnnxrtSessionArgs,
    RunnerSelectArgs,
    TrtConfigArgs,
    TrtLoadNetworkArgs,
)

from trt_lora.plugins.errors import BackendError, ConfigError, UnknownAdapterError
from trt_lora.runtime.adapters.fitting.fit import match_adapter
from trt_lora.runtime.adapters.load import load_adapter
from trt_lora.runtime.generation.sources import refuse_encoder
from trt_lora.runtime.manifest import ONNX_FILE, Manifest, Range, read_manifest
from trt_lora.runtime.memory.cuda import cuda_obstacle
from trt_lora.scripts.polygraphy_extension.data_args import use_inputs
from trt_lora.scripts.polygraphy_extension.data_loader import polygraphy_errors
from trt_lora.scripts.polygraphy_extension.option_names import (
    FALLBACK,
    FLOAT64,
    FLOAT64_NAME,
    NO_ADAPTER,
    TENSORRT_LORA,
)
from trt_lora.scripts.polygraphy_extension.outputs import lora_outputs, mark_sites, use_tolerance
from trt_lora.scripts.terminal.adapters import name_and_path
from trt_lora.scripts.verification.polygraphy_version import check_polygraphy_version

Shape = tuple[int, ...]

_TENSORRT = ("trt", TENSORRT_LORA)


@dataclass(frozen=True)
class LoraOptions:
    """LoRA options of the command line."""

    adapters: tuple[str, ...] = ()  # NAME=PATH
    use: str | None = None
    prompt: str | None = None
    engine: str | None = None
    fallback: bool = False  # without a GPU, the float64 reference runs in the place of TensorRT


def prepare(groups: Any, options: LoraOptions) -> Path:
    """Change polygraphy's argument groups as this file's first lines say; return the engine.

    Raises:
        PolygraphyException: an option is wrong; the message is logged.
    """
    with polygraphy_errors():
        check_polygraphy_version(polygraphy.__version__, "the LoRA extension")
        model = groups[ModelArgs].path
        if model is None:
            raise ConfigError(f"the LoRA options need a model, such as DIR/{ONNX_FILE}")
        engine = Path(options.engine or Path(model).parent).absolute()
        manifest = read_manifest(engine)
        refuse_encoder(manifest, "polygraphy's extension")
        is_onnx = groups[ModelArgs].model_type == "onnx"
        sites = lora_outputs(Path(model), manifest) if is_onnx else {}
        use_inputs(groups, engine, adapter_in_use(options, manifest), options.prompt)
        _use_profile(groups, manifest)
        _replace_runners(groups, fallback=options.fallback)
        runners = _runners(groups)
        _check_runners(groups, manifest, runners)
        compared = sites if FLOAT64 in runners and not runners & set(_TENSORRT) else {}
        mark_sites(groups, manifest, compared)
        use_tolerance(groups, manifest, compared)
    return engine


def adapter_in_use(options: LoraOptions, manifest: Manifest) -> Path | None:
    """Return the adapter that `--lora-use` names, or None for the base model.

    Raises:
        ConfigError: an adapter is of another form than NAME=PATH, or two have one name; or there
            are several, and nothing says which.
        UnknownAdapterError: none has that name.
        AdapterError: one of them, used or not, cannot be read, or the engine refuses it.
    """
    pairs = [name_and_path(text, "--lora-adapter") for text in options.adapters]
    paths = dict(pairs)
    if len(paths) < len(pairs) or NO_ADAPTER in paths:
        names = ", ".join(name for name, _ in pairs)
        raise ConfigError(f"--lora-adapter has {names}; give each a name, and none {NO_ADAPTER!r}")
    for path in paths.values():
        match_adapter(load_adapter(path, manifest), manifest)
    choices = ", ".join([*paths, NO_ADAPTER])
    if options.use is None and len(paths) > 1:
        raise ConfigError(f"--lora-use is missing; choose from: {choices}")
    use = options.use or next(iter(paths), NO_ADAPTER)
    if use != NO_ADAPTER and use not in paths:
        raise UnknownAdapterError(f"--lora-use is {use!r}; choose from: {choices}")
    return paths[use].absolute() if use != NO_ADAPTER else None


def _use_profile(groups: Any, manifest: Manifest) -> None:
    config = groups[TrtConfigArgs]
    # polygraphy makes a profile of --input-shapes, with 1 wherever they say nothing.
    is_given = config.profile_dicts and not groups[ModelArgs].input_shapes
    if manifest.profiles and not is_given:
        config.profile_dicts = [union(manifest.profiles)]
    groups[TrtLoadNetworkArgs].strongly_typed = True


def union(profiles: Mapping[str, Mapping[str, Range]]) -> dict[str, tuple[Shape, Shape, Shape]]:
    """Return one profile that allows all that the profiles do: min, opt and max by input."""
    last = list(profiles.values())[-1]
    every = {name: [ranges[name] for ranges in profiles.values()] for name in last}
    return {
        name: (
            tuple(map(min, zip(*(allowed.min for allowed in ranges), strict=True))),
            last[name].opt,
            tuple(map(max, zip(*(allowed.max for allowed in ranges), strict=True))),
        )
        for name, ranges in every.items()
    }


def _replace_runners(groups: Any, *, fallback: bool) -> None:
    """Refuse runners that cannot run here, or replace them."""
    select = groups[RunnerSelectArgs]
    asked = list(select.runners.items())
    dropped = " and ".join(f"--{option}" for option, _ in asked if option in _TENSORRT)
    obstacle = cuda_obstacle() if dropped else ""
    if not obstacle:
        return
    if not fallback:
        raise BackendError(
            f"{dropped} cannot run here: {obstacle}; leave it out, or add --{FALLBACK} to run "
            f"--{FLOAT64}, {FLOAT64_NAME}, instead"
        )
    G_LOGGER.warning(
        f"{dropped} cannot run here ({obstacle}): --{FLOAT64}, {FLOAT64_NAME}, runs instead"
    )
    float64 = (FLOAT64, FLOAT64_NAME)
    left = list(dict.fromkeys(float64 if runner[0] in _TENSORRT else runner for runner in asked))
    if len(left) == 1 < len(asked):
        raise ConfigError(
            f"with --{FALLBACK} every runner would be --{FLOAT64}, and nothing be compared; "
            "add --onnxrt"
        )
    select.runners = type(select.runners)(left)


def _runners(groups: Any) -> set[str]:
    return {option for option, _ in groups[RunnerSelectArgs].runners.items()}


def _check_runners(groups: Any, manifest: Manifest, runners: set[str]) -> None:
    if FLOAT64 in runners and groups[ModelArgs].model_type != "onnx":
        raise ConfigError(f"--{FLOAT64} reads ONNX; give the {ONNX_FILE} of the engine")
    is_cpu = "onnxrt" in runners and not groups[OnnxrtSessionArgs].providers
    if is_cpu and manifest.dtype == "bfloat16":
        raise ConfigError(
            f"--onnxrt cannot run bfloat16 on a CPU; compare --{FLOAT64} and --{TENSORRT_LORA}"
        )
