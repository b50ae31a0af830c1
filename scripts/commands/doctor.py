"""`trt-lora doctor`: what can run engines on this machine, and where one of them can run.

With ENGINE, it is opened on every GPU and on the CPU, and closed again, which takes as long as
opening it does. The exit status is 0 if it can run somewhere and 1 if it can run nowhere; without
ENGINE it is 0.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trt_lora.runtime.manifest import Manifest, load_manifest
from trt_lora.scripts.diagnosis.machine import FlavourState, Gpu, Machine, describe_machine
from trt_lora.scripts.diagnosis.places import Place, places
from trt_lora.scripts.terminal.printing import Fact, print_facts, print_json

_NO_DRIVER = "none; a GPU needs NVIDIA's (nvidia.com/drivers), the CPU needs none"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("engine", type=Path, nargs="?", metavar="ENGINE", help="what build-engine made")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(command=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    """Print; exit with 1 if the engine can run nowhere."""
    manifest = load_manifest(args.engine) if args.engine else None
    machine = describe_machine()
    found = places(args.engine, [gpu.index for gpu in machine.gpus]) if manifest else []
    if args.json:
        print_json(_as_json(machine, args.engine, manifest, found))
    else:
        print_facts(_machine_facts(machine))
        if manifest:
            print()
            print_facts(_engine_facts(args.engine, manifest, found))
    if found and all(place.obstacle for place in found):
        sys.exit(1)


def _as_json(
    machine: Machine, directory: Path | None, manifest: Manifest | None, found: Sequence[Place]
) -> dict[str, Any]:
    fields = dataclasses.asdict(machine)
    if manifest is None:
        return fields
    engine = {
        "path": str(directory),
        "flavour": manifest.flavour,
        "versions": dict(manifest.versions),
        "runs": any(not place.obstacle for place in found),
        "places": [dataclasses.asdict(place) for place in found],
    }
    return fields | {"engine": engine}


def _machine_facts(machine: Machine) -> Iterator[Fact]:
    memory = "" if machine.free_bytes is None else f", {machine.free_bytes / 1e9:.1f} GB free"
    yield "host", f"{machine.platform}, {machine.cpus} CPUs{memory}, Python {machine.python}"
    known = f", for CUDA up to {machine.driver_cuda}" if machine.driver_cuda else ""
    yield "driver", f"{machine.driver}{known}" if machine.driver else _NO_DRIVER
    if machine.cuda_obstacle:
        yield "GPUs", f"none can be used: {machine.cuda_obstacle}"
    for gpu in machine.gpus:
        yield f"GPU {gpu.index}", _gpu_fact(gpu)
    for flavour in machine.flavours:
        yield flavour.name, _flavour_fact(flavour)
    yield "onnxruntime", machine.onnxruntime_obstacle or "installed"
    yield "versions", ", ".join(f"{name} {number}" for name, number in machine.versions.items())


def _gpu_fact(gpu: Gpu) -> str:
    if gpu.obstacle:
        return f"cannot be used: {gpu.obstacle}"
    free, total = gpu.free_bytes / 1e9, gpu.total_bytes / 1e9
    capability = f"compute capability {gpu.compute_capability}"
    return f"{gpu.name}, {capability}, {free:.1f} of {total:.1f} GB free"


def _flavour_fact(flavour: FlavourState) -> str:
    if flavour.obstacle or not flavour.plugin_obstacle:
        return flavour.obstacle or "usable, with the LoRA plugin"
    return f"usable, without the LoRA plugin: {flavour.plugin_obstacle}"


def _engine_facts(directory: Path, manifest: Manifest, found: Sequence[Place]) -> Iterator[Fact]:
    plan = "no plan" if manifest.flavour == "none" else f"plan for {manifest.flavour}"
    yield "engine", f"{directory}: {plan}, {manifest.dtype}"
    yield "made with", ", ".join(f"{tool} {number}" for tool, number in manifest.versions.items())
    for place in found:
        name = "ONNX Runtime" if place.backend == "onnxruntime" else "TensorRT"
        yield f"{name} ({place.device})", f"no: {place.obstacle}" if place.obstacle else "yes"
