"""`pipeline.json`: which engine directories are the components of one pipeline."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.checked import typed
from trt_lora.plugins.errors import LoRAError, ManifestError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.adapters.formats.diffusion.spellings import COMPONENTS
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.files.untrusted_file import file_inside
from trt_lora.runtime.manifest import PIPELINE_FILE, Manifest, load_manifest

FORMAT = 1
_FIELDS = ("format", "class", "components")


@dataclass(frozen=True)
class PipelineFile:
    """What the file says."""

    kind: str  # class of diffusers' pipeline, such as StableDiffusionXLPipeline
    components: Mapping[str, str]  # their engine directories, by component, beside the file

    def to_json(self) -> str:
        """Return the text of the file."""
        values = (FORMAT, self.kind, dict(self.components))
        return json.dumps(dict(zip(_FIELDS, values, strict=True)), indent=1) + "\n"


def read_pipeline(directory: Path) -> PipelineFile:
    """Read the file in a directory, and see that its engines are there and are those components.

    Raises:
        ManifestError: there is no such file, it cannot be read, or says what is not so.
    """
    path = directory / PIPELINE_FILE
    if not path.is_file():
        load_manifest(directory)  # its error says what else the directory may be
        raise ManifestError(
            f"{directory} is the engine of one graph, not of a pipeline; open it with open_engine"
        )
    try:
        found = _parsed(read_json(path))
        for component, name in found.components.items():
            _check(component, load_manifest(file_inside(directory, name)))
    except ManifestError:
        raise
    except (LoRAError, ValueError) as error:
        raise ManifestError(
            f"{path} cannot be read: {error}; build the engines again with: build-engine --model "
            "PIPELINE_DIR"
        ) from error
    return found


def _parsed(data: Mapping[str, object]) -> PipelineFile:
    if unknown := [name for name in data if name not in _FIELDS]:
        raise ValueError(f"{shown(unknown[0])} is not known to this release")
    if missing := [name for name in _FIELDS if name not in data]:
        raise ValueError(f"{missing[0]} is missing")
    if data["format"] != FORMAT:
        raise ValueError(f"format is {shown(data['format'])}, this release reads {FORMAT}")
    kind = typed(str, data["class"], "class")
    components = typed(Mapping[str, str], data["components"], "components")
    for component, name in components.items():
        if component not in COMPONENTS:
            raise ValueError(f"{shown(component)} is none of {', '.join(COMPONENTS)}")
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{shown(name)} is not the name of a directory beside it")
    if not components:
        raise ValueError("it names no component")
    return PipelineFile(kind, components)


def _check(component: str, manifest: Manifest) -> None:
    if manifest.component != component:
        is_of = f"of {manifest.component}" if manifest.component else "of no component"
        raise ValueError(f"the engine of {component} is one {is_of}, by its own manifest")
