"""Report of `trt-lora compare`: a table, a JSON file and a shell script of its commands."""

import dataclasses
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from trt_lora.plugins.extras import installed_versions
from trt_lora.plugins.tensorrt.flavour import flavour_named
from trt_lora.runtime.files.file_record import sha256_of
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.comparison.bisect import SiteFault
from trt_lora.scripts.comparison.files import STEPS, Accuracy, check_complete
from trt_lora.scripts.comparison.references import Reference
from trt_lora.scripts.comparison.shell_commands import Command
from trt_lora.scripts.terminal.console import print_table

REPORT_FILE, COMMANDS_FILE = "report.json", "commands.sh"

_TOOLS = ("trt-lora", "polygraphy", "onnxruntime", "onnx", "onnx-ir", "numpy")


@dataclass(frozen=True)
class ComparisonRow:
    """One adapter, or the base model, on the engine and on the reference."""

    engine: str  # what ran the engine
    reference: str  # what it was compared with, and what ran that
    adapter: str
    outputs: int  # tensors compared, in all steps
    largest: float  # absolute error; NaN if shapes differ or a value is NaN
    mean: float  # absolute error, the mean of the outputs' means
    first_out_of_tolerance: str = ""
    site: SiteFault | None = None
    bisected: bool = False  # whether `site` was looked for

    @property
    def same(self) -> bool:
        """True if every output is within the tolerance."""
        return not self.first_out_of_tolerance


def compared_row(
    accuracy: Accuracy, reference: Reference, manifest: Manifest, adapter: str
) -> ComparisonRow:
    """Return the row of what polygraphy compared, once it is sure that this was everything.

    Raises:
        BackendError: an output was not compared.
    """
    check_complete(accuracy, [output.name for output in manifest.outputs])
    engine, other = (runner_text(name, manifest) for name in accuracy.runners)
    wrong = next((error for error in accuracy.errors if not error.within), None)
    return ComparisonRow(
        engine,
        f"{reference.graph}, {other}",
        adapter,
        len(accuracy.errors),
        float(np.max([error.largest for error in accuracy.errors])),
        float(np.mean([error.mean for error in accuracy.errors])),
        f"{wrong.name} ({STEPS[wrong.step % 2]})" if wrong else "",
    )


def runner_text(recorded: str, manifest: Manifest) -> str:
    """Return what ran, with its version and device.

    Args:
        recorded: name of a runner of polygraphy in a file of outputs.
        manifest: of the engine, which knows the flavour of its plan.
    """
    kind = recorded.partition("-runner-")[0]
    if kind == "onnxrt":  # polygraphy asks for no other provider by itself
        return f"ONNX Runtime {version('onnxruntime')} (CPU)"
    plugin = " with the LoRA plugin" if kind == "trt-lora" else ""
    trt = flavour_named(manifest.flavour).load()
    return f"{manifest.flavour} {trt.__version__}{plugin} (GPU)"


def print_rows(rows: Sequence[ComparisonRow]) -> None:
    """Print the table, and what was found of every adapter that differs."""
    header = (
        "engine", "compared with", "adapter", "outputs", "max |error|", "mean |error|",
        "first out of tolerance",
    )  # fmt: skip
    print_table(
        header,
        [
            (row.engine, row.reference, row.adapter, f"{row.outputs}", f"{row.largest:.2e}",
             f"{row.mean:.2e}", row.first_out_of_tolerance or "-")
            for row in rows
        ],
    )  # fmt: skip
    for row in rows:
        if row.bisected:
            where = row.site.text() if row.site else "no site: the fault lies behind the last one"
            print(f"{row.adapter}: the first site that differs is {where}")


def report(rows: Iterable[ComparisonRow], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows and the facts as JSON takes them."""
    listed = [{**dataclasses.asdict(row), "same": row.same} for row in rows]
    for row in listed:  # JSON has no NaN
        row |= {key: None for key in ("largest", "mean") if math.isnan(row[key])}
    versions = {"python": platform.python_version()} | installed_versions(_TOOLS)
    return {**facts, "versions": versions, "rows": listed}


def write_json(report: Mapping[str, Any], folder: Path) -> None:
    """Write the report to the folder."""
    (folder / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def file_hashes(path: Path) -> dict[str, str]:
    """Return the SHA-256 of an adapter's files, by name."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: sha256_of(file) for file in files if file.is_file()}


def write_commands(
    commands: Mapping[str, Sequence[Command]], places: Mapping[str, Path], folder: Path
) -> None:
    """Write a shell script of all commands, by adapter; it runs in the folder that it lies in."""
    lines = [
        "#!/bin/sh",
        "# What `trt-lora compare` ran. Run it in this folder: it reads inputs/, and writes",
        f"# outputs/ and accuracy/ again. The versions that it ran with are in {REPORT_FILE}.",
        *(f': "${{{name}:={path}}}"' for name, path in places.items()),
    ]
    for name, ran in commands.items():
        lines += ["", f"# {name}", *(command.text() for command in ran)]
    lines += ["", "rm -rf models models.other"]
    (folder / COMMANDS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
