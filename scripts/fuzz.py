"""Let a coverage-guided fuzzer (atheris) look for files that break the loaders, kind by kind.

    python scripts/fuzz.py [--seconds N] [--runs N]

Every kind has a process of its own, for libFuzzer ends it by itself, and a corpus of valid files.
"""

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARTIFACTS = ROOT / "build" / "fuzz"
KINDS = ("safetensors", "peft", "npy", "onnx_adapter", "manifest")
CHILD = "--kind"
LIMITS = ("-timeout=10", "-rss_limit_mb=1024", "-max_len=8192", "-print_final_stats=1")


@dataclass(frozen=True)
class Outcome:
    """What the fuzzer did to one kind."""

    kind: str
    inputs: int
    seconds: int
    failed: bool
    log: str

    def __str__(self) -> str:
        """Return one line, and what failed below it."""
        line = f"{self.kind:<14}{self.inputs:>9} inputs{self.seconds:>5} s"
        if not self.failed:
            return line
        paths = re.findall(r"written to (\S+)", self.log)
        return f"{line}  FAILED: {', '.join(paths) or 'no input'}\n{self.log[-3000:]}"


def main() -> int:
    """Run every kind; 1 if one failed."""
    options = _options()
    outcomes = [_fuzz(kind, options.seconds, options.runs) for kind in options.only]
    print(*outcomes, sep="\n")
    print(f"{'total':<14}{sum(outcome.inputs for outcome in outcomes):>9} inputs")
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
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="kinds to try")
    return parser.parse_args()


def _fuzz(kind: str, seconds: int, runs: int) -> Outcome:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    bounds = (f"-max_total_time={seconds}", f"-runs={runs}", "-seed=1")
    artifacts = f"-artifact_prefix={ARTIFACTS / kind}-"
    with tempfile.TemporaryDirectory() as folder:  # not of the child, which cannot remove it
        command = [sys.executable, __file__, CHILD, kind, folder, *LIMITS, *bounds, artifacts]
        child = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    log = child.stderr + child.stdout  # the traceback is in the latter
    inputs, took = (
        _number(before, log) for before in ("number_of_executed_units: +", r"\d runs in ")
    )
    return Outcome(kind, inputs, took, child.returncode != 0, log)


def _number(before: str, log: str) -> int:
    found = re.findall(rf"{before}(\d+)", log)
    return int(found[-1]) if found else 0


def _child(kind: str, folder: Path, arguments: list[str]) -> None:
    """Fuzz one kind in this process, which libFuzzer ends."""
    atheris: Any = importlib.import_module("atheris")  # it ships no types
    # The targets are tests, and no package of the distribution.
    sys.path.insert(0, str(ROOT / "tests"))
    with atheris.instrument_imports(include=["trt_lora.runtime"]):
        from hostile.targets import TARGETS, seeds, write
    corpus = write(folder / "corpus", {str(n): data for n, data in enumerate(seeds(kind))})
    target = partial(TARGETS[kind], folder / "work")
    atheris.Setup([sys.argv[0], str(corpus), *arguments], target)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        _child(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    sys.exit(main())
