"""Let a coverage-guided fuzzer (atheris) look for files that break the loaders; stress the rest.

    python tests/hostile/fuzz.py [--seconds N] [--runs N] [--stress-seconds N]

Every kind of file has a process of its own, for libFuzzer ends it by itself, and a corpus of valid
files. So has every stress: `run` of `tests/hostile/stress_<name>.py` compares answers for so many
seconds, raises at the first wrong one, and returns how many it has compared.
"""

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "build" / "fuzz"
KINDS = ("safetensors", "diffusion", "peft", "npy", "onnx_adapter", "manifest")
STRESSES = ("threads", "rewrites", "slots")
CHILD, STRESS_CHILD = "--kind", "--stress"
LIMITS = ("-timeout=10", "-rss_limit_mb=1024", "-max_len=8192", "-print_final_stats=1")


@dataclass(frozen=True)
class Outcome:
    """What was done to one kind of file, or in one stress."""

    name: str
    checks: int
    unit: str  # what `checks` counts
    seconds: int
    failed: bool
    log: str

    def __str__(self) -> str:
        """Return one line, and what failed below it."""
        line = f"{self.name:<14}{self.checks:>9} {self.unit:<8}{self.seconds:>4} s"
        if not self.failed:
            return line
        paths = re.findall(r"written to (\S+)", self.log)
        return f"{line}  FAILED: {', '.join(paths) or 'see below'}\n{self.log[-3000:]}"


def main() -> int:
    """Run every kind and every stress; 1 if one failed."""
    options = _options()
    outcomes = [
        _fuzz(name, options.seconds, options.runs)
        if name in KINDS
        else _stress(name, options.stress_seconds)
        for name in options.only
    ]
    print(*outcomes, sep="\n")
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=12, help="for each kind (default: 12)")
    parser.add_argument(
        "--runs",
        type=int,
        default=20_000,
        help="inputs of each kind at most (default: 20000); -1: no limit",
    )
    parser.add_argument(
        "--stress-seconds", type=int, default=60, help="for each stress (default: 60)"
    )
    names = (*KINDS, *STRESSES)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="what to try")
    return parser.parse_args()


def _fuzz(kind: str, seconds: int, runs: int) -> Outcome:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    bounds = (f"-max_total_time={seconds}", f"-runs={runs}", "-seed=1")
    artifacts = f"-artifact_prefix={ARTIFACTS / kind}-"
    with tempfile.TemporaryDirectory() as folder:  # not of the child, which cannot remove it
        status, log = _in_process(CHILD, kind, folder, *LIMITS, *bounds, artifacts)
    inputs, took = (
        _number(before, log) for before in ("number_of_executed_units: +", r"\d runs in ")
    )
    return Outcome(kind, inputs, "inputs", took, status != 0, log)


def _stress(name: str, seconds: int) -> Outcome:
    started = time.monotonic()
    status, log = _in_process(STRESS_CHILD, name, str(seconds))
    took = round(time.monotonic() - started)
    return Outcome(name, _number("checked: ", log), "answers", took, status != 0, log)


def _in_process(*arguments: str) -> tuple[int, str]:
    """Run this file in a process of its own; return its status and all that it wrote."""
    command = [sys.executable, __file__, *arguments]
    child = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return child.returncode, child.stderr + child.stdout  # a traceback may be in either


def _number(before: str, log: str) -> int:
    found = re.findall(rf"{before}(\d+)", log)
    return int(found[-1]) if found else 0


def _child(kind: str, folder: Path, arguments: list[str]) -> None:
    """Fuzz one kind in this process, which libFuzzer ends."""
    atheris: Any = importlib.import_module("atheris")  # it ships no types
    with atheris.instrument_imports(include=["trt_lora.runtime"]):
        from hostile.targets import TARGETS, seeds, write
    corpus = write(folder / "corpus", {str(n): data for n, data in enumerate(seeds(kind))})
    target = partial(TARGETS[kind], folder / "work")
    atheris.Setup([sys.argv[0], str(corpus), *arguments], target)
    atheris.Fuzz()


def _stress_child(name: str, seconds: int) -> None:
    """Run one stress in this process, which it may end."""
    print(f"checked: {importlib.import_module(f'hostile.stress_{name}').run(seconds)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))  # they are no package of the distribution
    if sys.argv[1:2] == [CHILD]:
        _child(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1:2] == [STRESS_CHILD]:
        _stress_child(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main())
