"""CPU benchmark: ratios within one run on one machine, as tables and JSON.

    python -m trt_lora.scripts.bench.cpu [NAME ...]

The names are those of the functions below. decode, dummies, switch, build, compare and cold-start
need the demo's model and engine (`make demo`). Every ratio alternates the two sides, so that a
noisy neighbour slows both.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.builder.versions import tool_versions
from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.adapters.formats.peft import WEIGHTS_FILE
from trt_lora.scripts.bench.decode_seconds import (
    DECODE_STEPS,
    engine_decode_seconds,
    peft_decode_seconds,
)
from trt_lora.scripts.bench.sampling import sampling
from trt_lora.scripts.bench.serving.adapter_cache import adapter_cache
from trt_lora.scripts.bench.serving.scheduling import scheduling
from trt_lora.scripts.demo.__main__ import ADAPTERS, ENGINE, MODULES
from trt_lora.scripts.demo.model import DEFAULT_DIRECTORY
from trt_lora.scripts.measuring.machine import host_machine
from trt_lora.scripts.measuring.seconds import in_turns, medians_in_turns
from trt_lora.scripts.terminal.adapters import activate, timed_switch
from trt_lora.scripts.verification.peft_reference import PeftReference

OUTPUT = Path("docs/benchmarks/cpu.json")
ADAPTER = "json"  # rank 4 on all seven linears: every binding carries a weight
ROUNDS = 7
OPENINGS = 9  # of engines that are closer to each other than one opening is to the next

# Dtype of the file, dtype of the engine, scale, ranks; alpha = 2 r is the commonest, and rsLoRA's
# scale is no power of two.
LOADS = (
    ("float16", "float16", 2.0, (8, 16, 64, 256)),
    ("bfloat16", "float16", 2.0, (8, 16, 64, 256)),
    ("float32", "float16", 2.0, (8, 16, 64)),
    ("float16", "float16", 16 / 63**0.5, (8, 16, 64)),
    ("bfloat16", "float16", 16 / 63**0.5, (16, 64)),
    ("bfloat16", "bfloat16", 2.0, (16, 64)),
    ("float32", "bfloat16", 2.0, (16, 64)),
    ("float32", "float32", 2.0, (16, 64)),
    ("float16", "float32", 2.0, (16, 64)),
)

STRENGTHS = (("float16", 16), ("bfloat16", 16), ("float32", 8))  # dtype and rank: 84 MB each

Results = dict[str, float | str]


def decode() -> Results:
    """Decode tokens/s with one adapter active, against transformers + PEFT in this process."""
    reference = PeftReference(DEFAULT_DIRECTORY, {ADAPTER: ADAPTERS / ADAPTER}, attention="sdpa")
    with open_engine(ENGINE) as engine:
        manager = _manager(engine)
        ours, theirs = medians_in_turns(
            lambda: engine_decode_seconds(engine, manager, ADAPTER),
            lambda: peft_decode_seconds(reference.model),
            ROUNDS,
        )
    return {
        "ours, tokens/s": DECODE_STEPS / ours,
        "transformers + PEFT, tokens/s": DECODE_STEPS / theirs,
        "ratio (target: 1.5 or more)": theirs / ours,
    }


def dummies() -> Results:
    """Decode with LoRA inputs and no adapter, against the same export without LoRA inputs."""
    with tempfile.TemporaryDirectory() as scratch:
        plain = engine_without_lora(ENGINE, Path(scratch))
        # Where weights lie in memory makes more of a difference than what is measured.
        rounds = [pair for _ in range(OPENINGS) for pair in _dummy_rounds(plain)]
    with_inputs, without = (statistics.median(side) for side in zip(*rounds, strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    return {
        "with 420 dummies, ms/token": with_inputs / DECODE_STEPS * 1e3,
        "without LoRA inputs, ms/token": without / DECODE_STEPS * 1e3,
        "cost of dummies, % (target: 5 or less)": (ratio - 1) * 100,
    }


def _dummy_rounds(plain: Path) -> list[tuple[float, float]]:
    """Seconds with dummies and without, in turns, with both engines opened anew."""
    with open_engine(ENGINE) as engine, open_engine(plain) as other:
        managers = _manager(engine), _manager(other)
        return in_turns(
            lambda: engine_decode_seconds(engine, managers[0], ""),
            lambda: engine_decode_seconds(other, managers[1], ""),
            ROUNDS,
        )


def switch() -> Results:
    """`switch_weights` + `refresh_tensor_map` for every binding, and what they copy or allocate."""
    with open_engine(ENGINE) as engine:
        manager = _manager(engine)
        names = ["", *manager.get_adapter_names()]
        before = {name: _pointers(manager, name) for name in names}
        times = [timed_switch(manager, names[i % len(names)]) for i in range(2000)]
        moved = sum(_pointers(manager, name) != before[name] for name in names)
    return {
        "bindings": len(before[""]),
        "median, us (target: under 200)": statistics.median(times),
        "99th percentile, us": statistics.quantiles(times, n=100)[98],
        "adapters whose pointers moved": moved,
        "distinct dummy buffers": len(set(before[""].values())),
    }


def many_adapters() -> Results:
    """Decode 8 rows with adapters of their own, tokens/s of all rows."""
    with tempfile.TemporaryDirectory() as scratch:
        adapter = ADAPTERS / ADAPTER
        printed = _in_process("peers.many_adapters", DEFAULT_DIRECTORY, scratch, adapter)
    return dict(json.loads(printed))


def decode_host() -> Results:
    """The host's part of a decode step on a GPU, where CUDA and TensorRT return at once."""
    measured = json.loads(_in_process("decode_host"))
    return {
        "bindings": measured["bindings"],
        "a token, a graph launch, us (target: under 60)": measured["step"],
        "the first token after a switch between captured adapters, us": measured["switch"],
    }


def load() -> Results:
    """Load adapters of Llama-3-8B's shapes from the page cache, against safetensors' reader."""
    results: Results = {}
    cases = [(rank, *cast) for *cast, ranks in LOADS for rank in ranks]
    for rank, stored, engine, scale in cases:
        label = f"rank {rank}, {stored} -> {engine}, scale {scale:.3g}"
        target = 2.0 if rank <= 16 else 1.5
        with tempfile.TemporaryDirectory() as scratch:
            adapter = Path(scratch) / "adapter"
            _in_process("adapter_load", "write", adapter, rank, stored, scale)
            size = (adapter / WEIGHTS_FILE).stat().st_size
            seconds = json.loads(_in_process("adapter_load", "time", adapter, engine))
            peak = json.loads(_in_process("adapter_load", "peak", adapter, engine))
        results[f"{label}: ms for {size / 1e6:.0f} MB"] = seconds["ours"] * 1e3
        results[f"{label}: GB/s"] = size / seconds["ours"] / 1e9
        results[f"{label}: time / load_file (target: under {target})"] = (
            seconds["ours"] / seconds["load_file"]
        )
        results[f"{label}: processor time / load_file"] = (
            seconds["ours_cpu"] / seconds["load_file_cpu"]
        )
        results[f"{label}: peak memory / size (target: under 1.2)"] = peak["peak"] / size
    return results


def strength() -> Results:
    """Switch adapters of Llama-3-8B's shapes to other strengths, each with B's of its own."""
    results: Results = {}
    for dtype, rank in STRENGTHS:
        measured = json.loads(_in_process("strength", dtype, rank))
        label = f"rank {rank}, {dtype}, {measured['size'] / 1e6:.0f} MB"
        for scale in ("0.5", "0.3"):
            results[f"{label}: ms to strength {scale} (target: under 60)"] = measured[scale] * 1e3
            results[f"{label}: time of {scale} / copy of B"] = measured[scale] / measured["copy"]
        results[f"{label}: ms of the first switch"] = measured["first"] * 1e3
        results[f"{label}: memory of two adapters' strengths / size (target: under 0.6)"] = (
            measured["more"] / measured["size"]
        )
    return results


def _in_process(script: str, *arguments: object) -> str:
    """Run a script of this folder in a process of its own and return what it prints."""
    command = [sys.executable, "-m", f"trt_lora.scripts.bench.{script}", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def callbacks() -> Results:
    """`on_shape_change` + `enqueue` of Llama-3-8B's LoRA nodes, as without a CUDA graph."""
    nodes: dict[str, dict[str, float]] = json.loads(_in_process("plugin_callbacks", 40))
    results: Results = {}
    for name, times in nodes.items():
        results[f"{name}: plugin callbacks, us a node (target: under 8)"] = times["both"]
        results[f"{name}: on_shape_change, us"] = times["on_shape_change"]
        results[f"{name}: enqueue, us"] = times["enqueue"]
        results[f"{name}: of these, reading and comparing dims, us"] = times["reads"]
        results[f"{name}: plugin callbacks after changed dims, us"] = times["both_changed"]
    mean = statistics.mean(times["both"] for times in nodes.values())
    return results | {"plugin callbacks, us a node, mean of a layer (target: under 8)": mean}


def build() -> Results:
    """Time and peak memory of every stage of a build of the demo, in its own process."""
    with tempfile.TemporaryDirectory() as scratch:
        output = _in_process("build_stages", DEFAULT_DIRECTORY, f"{scratch}/engine", *MODULES)
    stages: list[dict[str, Any]] = json.loads(output)
    results: Results = {f"{s['stage']}, s": s["seconds"] for s in stages}
    model = (DEFAULT_DIRECTORY / "model.safetensors").stat().st_size
    for stage in stages:
        results[f"{stage['stage']}, peak memory, GB"] = stage["peak_bytes"] / 1e9
    export = max(s["peak_bytes"] for s in stages if s["stage"] in ("load", "export", "insert"))
    results["export, peak memory / model size (target: under 1.5)"] = export / model
    return results


def compare() -> Results:
    """`trt-lora compare` with every adapter of the demo, against merged weights."""
    adapters = [f"{path.name}={path}" for path in sorted(ADAPTERS.iterdir())]
    measured = json.loads(_in_process("compare_command", ENGINE, *adapters))
    return {
        "adapters": len(adapters),
        "seconds (target: under 180)": measured["seconds"],
        "peak memory, GB (target: under 4)": measured["peak"] / 1e9,
    }


def cold_start() -> Results:
    """First token of the demo's engine from the start of a process, files in the page cache."""
    started = [
        json.loads(_in_process("cold_start", ENGINE, ADAPTERS / ADAPTER, time.monotonic()))
        for _ in range(ROUNDS)
    ]
    first, resident, held = (
        statistics.median(s[name] for s in started)
        for name in ("first_token_seconds", "resident", "weights_and_cache")
    )
    return {
        "seconds to the first token (target: under 3)": first,
        "resident memory, GB": resident / 1e9,
        "weights and cache, GB": held / 1e9,
        "resident memory / weights and cache (target: under 1.15)": resident / held,
    }


MEASUREMENTS: dict[str, Callable[[], Results]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(decode, dummies, switch, decode_host, sampling, strength, load, callbacks, build),
        *(compare, cold_start, many_adapters, adapter_cache, scheduling),
    )
}


def main() -> None:
    """Run the measurements named, or all; merge them into the JSON file."""
    parser = argparse.ArgumentParser(description="Measure what the project claims")
    parser.add_argument("names", nargs="*", help=f"{', '.join(MEASUREMENTS)} (default: all)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MEASUREMENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(MEASUREMENTS)}")
    known = json.loads(args.output.read_text()) if args.output.exists() else {}
    machine = {**host_machine(), "versions": tool_versions()}
    for name in args.names or MEASUREMENTS:
        results = MEASUREMENTS[name]()
        _print(name, results)
        known[name] = results
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(known | {"machine": machine}, indent=1) + "\n")


def _print(name: str, results: Results) -> None:
    table = Table("", name, title=MEASUREMENTS[name].__doc__, title_justify="left")
    for label, value in results.items():
        table.add_row(label, value if isinstance(value, str) else f"{value:.4g}")
    Console().print(table)


def _manager(engine: Engine) -> LoRAManager:
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    for path in sorted(ADAPTERS.iterdir()) if engine.manifest.sites else ():
        manager.load_weights(path.name, path)
    return manager


def _pointers(manager: LoRAManager, name: str) -> dict[str, int]:
    activate(manager, name)
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    return {binding: tensor.pointer for binding, tensor in tensor_map.items()}


if __name__ == "__main__":
    main()
