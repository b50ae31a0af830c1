"""The nodes: an engine loader (MODEL, CLIP), and a stack of LoRA files with strengths."""

# pyright: reportMissingImports=false

import logging
import os
import re
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import folder_paths

from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import did_you_mean
from trt_lora.runtime import open_engine
from trt_lora.runtime.manifest import MANIFEST_FILE, PIPELINE_FILE
from trt_lora.runtime.pipelines.engines import PipelineEngines, open_pipeline

from .denoiser import model_of
from .families import family_of
from .patcher import EnginePatcher
from .text_encoder import clip_of

FOLDER = "trt_lora"  # of engines, among ComfyUI's models
_DENOISERS = ("unet", "transformer")
_NUMBER = r"[+-]?\d*\.?\d+"
_LINE = re.compile(rf"(?P<file>.+?)\s+(?P<model>{_NUMBER})(?:\s+(?P<clip>{_NUMBER}))?")
_LOG = logging.getLogger(__name__)

folder_paths.add_model_folder_path(FOLDER, os.path.join(folder_paths.models_dir, FOLDER))


class EngineLoader:
    """Opens a directory that build-engine made."""

    RETURN_TYPES = ("MODEL", "CLIP")
    FUNCTION = "load"
    CATEGORY = "loaders/trt-lora"
    DESCRIPTION = (
        "A pipeline or a denoiser that build-engine made, in models/trt_lora. LoRA nodes behind it "
        "change inputs of the engine. CLIP is there if the pipeline has its text encoders."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """What the node shows."""
        return {"required": {"engine": (engine_names(),)}}

    def load(self, engine: str) -> tuple[EnginePatcher, Any]:
        """Return MODEL, and CLIP or None.

        Raises:
            ConfigError: there is no such engine, or ComfyUI's calls of its model are not known.
            ManifestError, BackendError: as `open_pipeline`.
        """
        engines = _engines(_directory(engine))
        component = next((name for name in _DENOISERS if name in engines.engines), None)
        if component is None:
            raise ConfigError(f"{engine} has no denoiser, only {', '.join(engines.engines)}")
        family = family_of(engines.engines[component].manifest)
        with ExitStack() as opened:
            opened.enter_context(engines)
            model, clip = model_of(engines, component, family), clip_of(engines, family.config)
            _close_with([model.model, *([clip.cond_stage_model] if clip else [])], engines)
            opened.pop_all()
        if clip is None:
            _LOG.info("%s has not all text encoders: load CLIP with ComfyUI's own loader", engine)
        return model, clip


class LoraStack:
    """Loads LoRA files with the readers of trt-lora, which leave nothing out in silence."""

    RETURN_TYPES = ("MODEL", "CLIP", "STRING")
    RETURN_NAMES = ("MODEL", "CLIP", "coverage")
    FUNCTION = "load"
    CATEGORY = "loaders/trt-lora"
    DESCRIPTION = (
        "LoRA files on an engine, one a line: FILE STRENGTH, or FILE STRENGTH CLIP_STRENGTH. FILE "
        "is in models/loras, or a path."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """What the node shows."""
        text = ("STRING", {"multiline": True, "default": "style.safetensors 0.7"})
        return {
            "required": {"model": ("MODEL",), "loras": text},
            "optional": {"clip": ("CLIP",)},
        }

    def load(self, model: Any, loras: str, clip: Any = None) -> tuple[Any, Any, str]:
        """Return clones with the files' adapters, and what became of the files' tensors.

        Raises:
            ConfigError: MODEL or CLIP is no engine's, or a line says no file and strength.
            AdapterError: a file cannot be read, or has a tensor that no engine takes.
        """
        model, clip = model.clone(), None if clip is None else clip.clone()
        patchers = [model] if clip is None else [model, clip.patcher]
        engines = _engines_of(patchers)
        coverage = []
        for line in filter(None, map(str.strip, loras.splitlines())):
            path, strengths = _parsed(line)
            name = _loaded(engines, path)
            for patcher, strength in zip(patchers, strengths, strict=False):
                patcher.add_lora(name, strength)
            coverage += [f"{c}: {each!r}" for c, each in engines.adapters.coverage(name).items()]
        _LOG.info("%s", "\n".join(coverage))
        return model, clip, "\n".join(coverage)


def engine_names() -> list[str]:
    """The directories in models/trt_lora with a pipeline or an engine."""
    return sorted(
        file.parent.name
        for folder in map(Path, folder_paths.get_folder_paths(FOLDER))
        for file in (*folder.glob(f"*/{PIPELINE_FILE}"), *folder.glob(f"*/{MANIFEST_FILE}"))
    )


def _directory(name: str) -> Path:
    for folder in map(Path, folder_paths.get_folder_paths(FOLDER)):
        if (folder / name).is_dir():
            return folder / name
    known = engine_names()
    raise ConfigError(
        f"models/{FOLDER} has no engine {name!r}; it has: {', '.join(known) or 'none'}"
        f"{did_you_mean(name, known)}"
    )


def _engines(directory: Path) -> PipelineEngines:
    """The engines of a pipeline; one engine by itself is a pipeline of one component."""
    if (directory / PIPELINE_FILE).is_file():
        return open_pipeline(directory)
    engine = open_engine(directory)
    return PipelineEngines(directory, "", {engine.manifest.component or _DENOISERS[0]: engine})


def _engines_of(patchers: Sequence[Any]) -> PipelineEngines:
    """The engines of MODEL and CLIP, which are the same."""
    first, *others = [
        patcher.model_loras.engines if isinstance(patcher, EnginePatcher) else None
        for patcher in patchers
    ]
    if first is None or any(engines is not first for engines in others):
        raise ConfigError(
            "MODEL and CLIP are not of one engine loader; for a model that ComfyUI runs itself, "
            "leave that input open and use LoraLoader"
        )
    return first


def _parsed(line: str) -> tuple[Path, tuple[float, float]]:
    """The file of a line, and its strengths for MODEL and CLIP."""
    if not (match := _LINE.fullmatch(line)):
        raise ConfigError(f"{line!r} is no line such as: style.safetensors 0.7, or 0.7 0.5")
    known = folder_paths.get_full_path("loras", match["file"])
    path = Path(known or match["file"])
    if not path.exists():
        names = folder_paths.get_filename_list("loras")
        raise ConfigError(
            f"{match['file']!r} is neither in models/loras nor a path"
            f"{did_you_mean(match['file'], names)}"
        )
    model = float(match["model"])
    return path, (model, float(match["clip"] or model))


def _loaded(engines: PipelineEngines, path: Path) -> str:
    """The name of a file's adapter; a file that was written since is another one."""
    stat = path.stat()
    name = f"{path.name} {stat.st_size} {stat.st_mtime_ns} {crc32(bytes(path.absolute()))}"
    if name not in engines.adapters.names:
        engines.adapters.load(name, path)
    return name


class _Open:
    """Lives as long as a MODEL or a CLIP of one loader."""


def _close_with(models: Sequence[Any], engines: PipelineEngines) -> None:
    """Close engines when the last of the models is gone, which is when ComfyUI drops its nodes."""
    opened = _Open()
    weakref.finalize(opened, engines.__exit__, None, None, None)
    for model in models:
        model.trt_lora_open = opened
