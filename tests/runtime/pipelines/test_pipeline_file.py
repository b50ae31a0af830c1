"""pipeline.json: what is read, and what is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.adapters.diffusion.pipelines import manifests
from support.refusals import refused

from trt_lora.plugins.errors import ManifestError
from trt_lora.runtime import open_engine, open_pipeline
from trt_lora.runtime.manifest import MANIFEST_FILE, PIPELINE_FILE
from trt_lora.runtime.pipelines.pipeline_file import PipelineFile, read_pipeline

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    """A folder whose engines have a manifest alone."""
    for component, manifest in manifests().items():
        (tmp_path / component).mkdir()
        (tmp_path / component / MANIFEST_FILE).write_text(manifest.to_json())
    file = PipelineFile("StableDiffusionXLPipeline", {name: name for name in manifests()})
    (tmp_path / PIPELINE_FILE).write_text(file.to_json())
    return tmp_path


def test_the_file_says_what_was_written(engines: Path) -> None:
    found = read_pipeline(engines)
    assert found.kind == "StableDiffusionXLPipeline"
    assert found.components == {name: name for name in manifests()}


WRONG: dict[str, tuple[Change, str]] = {
    "another field": (lambda d: d.update(version=2), "'version' is not known to this release"),
    "a field less": (lambda d: d.pop("class"), "class is missing"),
    "a newer format": (lambda d: d.update(format=2), "format is 2, this release reads 1"),
    "a class that is no text": (lambda d: d.update({"class": 3}), "class is 3, expected str"),
    "no mapping": (lambda d: d.update(components=["unet"]), "components is ['unet']"),
    "nothing": (lambda d: d.update(components={}), "it names no component"),
    "no component": (lambda d: d["components"].update(vae="unet"), "'vae' is none of"),
    "a path": (lambda d: d["components"].update(unet="../unet"), "'../unet' is not the name"),
    "here": (lambda d: d["components"].update(unet="."), "'.' is not the name"),
    "no text": (lambda d: d["components"].update(unet=1), "components['unet'] is 1"),
    "no directory": (lambda d: d["components"].update(unet="unet2"), "unet2 does not exist"),
    "another component": (
        lambda d: d["components"].update(unet="text_encoder"),
        "the engine of unet is one of text_encoder",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_says_what_is_not_so_is_refused(wrong: str, engines: Path) -> None:
    change, said = WRONG[wrong]
    data = json.loads((engines / PIPELINE_FILE).read_text())
    change(data)
    (engines / PIPELINE_FILE).write_text(json.dumps(data))
    with refused(ManifestError, said):
        open_pipeline(engines)


def test_a_link_that_leads_outside_is_refused(engines: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "unet"
    (engines / "unet").rename(elsewhere)
    (engines / "unet").symlink_to(elsewhere)
    with refused(ManifestError, "leads out of"):
        open_pipeline(engines)


def test_an_engine_that_was_built_by_itself_is_refused(engines: Path) -> None:
    manifest = replace(manifests()["unet"], component="")
    (engines / "unet" / MANIFEST_FILE).write_text(manifest.to_json())
    with refused(ManifestError, "the engine of unet is one of no component"):
        open_pipeline(engines)


def test_each_of_both_directories_is_told_from_the_other(engines: Path) -> None:
    with refused(ManifestError, "is the engine of one graph", "open_engine"):
        open_pipeline(engines / "unet")
    with refused(ManifestError, "is a pipeline with engines of", "open_pipeline"):
        open_engine(engines)
    (engines / PIPELINE_FILE).unlink()
    with refused(ManifestError, "it is not an engine directory; pass one that lies in it"):
        open_pipeline(engines)
    (engines / PIPELINE_FILE).write_text("{")
    with refused(ManifestError, "is not JSON", "build the engines again"):
        open_pipeline(engines)
