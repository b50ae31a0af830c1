"""Integrity check of an engine directory against its manifest: sampled or full SHA-256.

They are large, and a copy that ended early or a disk that lost pages answers like any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.checked import check_choice
from trt_lora.plugins.errors import ManifestError
from trt_lora.runtime.files.file_record import FAST, FULL, fault
from trt_lora.runtime.manifest import (
    BACKEND_FILES,
    ENCODER_FILES,
    MANIFEST_FILE,
    STEP_FILES,
    Manifest,
    left_out,
)

CHECKS = (FAST, FULL)

# Of these a manifest says nothing.
_OUR_OWN = (MANIFEST_FILE, STEP_FILES.runtime_cache, ENCODER_FILES.runtime_cache)


@dataclass(frozen=True)
class EngineFiles:
    """Differences between the files of an engine directory and its manifest."""

    faults: Mapping[str, str]  # by file of the manifest that is not as recorded
    left_out: tuple[str, ...]  # those of the backend whose files are all missing
    unlisted: tuple[str, ...]  # what is there, and not in the manifest


def compare_files(directory: Path, manifest: Manifest) -> EngineFiles:
    """Read every file whole, and list those that the manifest does not know.

    Raises:
        ManifestError: a file cannot be read.
    """
    absent = left_out(directory, manifest.files)
    faults = {
        name: difference
        for name, record in manifest.files.items()
        if name not in absent and (difference := fault(directory / name, record, FULL))
    }
    unlisted = {path.name for path in directory.iterdir()} - {*manifest.files, *_OUR_OWN}
    return EngineFiles(faults, tuple(sorted(absent)), tuple(sorted(unlisted)))


def check_files(directory: Path, manifest: Manifest, check: str, backend: str) -> None:
    """Refuse an engine whose files are not those that its manifest speaks of.

    Args:
        directory: the engine's.
        manifest: its manifest.
        check: "fast" compares sizes and `sampled_sha256` of all but what only the other backend
            reads; "full" the SHA-256 of every file that is there.
        backend: "tensorrt" or "onnxruntime".

    Raises:
        ManifestError: a file differs, cannot be read, or is missing or not in the manifest although
            the backend reads it.
        ConfigError: there is no such check.
    """
    check_choice("check", check, CHECKS)
    if unlisted := [n for n in _read_by(backend, manifest) if n not in manifest.files]:
        raise ManifestError(
            f"{directory / MANIFEST_FILE} says nothing of {' and '.join(unlisted)}: nothing shows "
            "whether it is damaged or of another build; copy or build the engine again"
        )
    others = {name for kind, own in BACKEND_FILES.items() if kind != backend for name in own}
    for name, record in manifest.files.items():
        file = directory / name
        if name in others and (check == FAST or not file.exists()):
            continue
        if found := fault(file, record, check):
            raise ManifestError(
                f"{file} {found}: it is missing, damaged or of another build; copy or build the "
                f"engine again (trt-lora check {directory} compares all its files)"
            )


def _read_by(backend: str, manifest: Manifest) -> list[str]:
    """The files that a backend reads in any case."""
    graphs = [STEP_FILES, *([ENCODER_FILES] if manifest.encoder else [])]
    if backend == "tensorrt":
        return [graph.plan for graph in graphs]
    return [name for graph in graphs for name in (graph.onnx, graph.weights)]
