"""Build every architecture small, compare it, and write docs/supported-models.json and .md.

    python tests/end_to_end/sweep_architectures.py [--jobs N] [MODEL_TYPE ...]

Each runs in a process of its own; a result is kept as soon as it is there, so that a few model
types can be done again without the others.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from support.models.architecture_check import check_architecture
from support.models.architectures import MODEL_TYPES
from support.models.supported_models import Results, read_results, write_results

TIMEOUT_S = 900


def main() -> int:
    """Return 1 if a model type neither builds as it should nor is refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model_types", nargs="*", default=MODEL_TYPES, metavar="MODEL_TYPE")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (2)")
    parser.add_argument("--one", action="store_true", help="print one verdict, as JSON")
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asdict(check_architecture(options.model_types[0], Path(folder)))))
        return 0
    failed = _sweep(options.model_types, options.jobs)
    for model_type, report in failed.items():
        print(f"{model_type}: {report}")
    return 1 if failed else 0


def _sweep(model_types: tuple[str, ...], jobs: int) -> dict[str, str]:
    results, failed = read_results(), dict[str, str]()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_judge, name): name for name in model_types}
        for future in as_completed(running):
            name, (verdict, report) = running[future], future.result()
            results.pop(name, None)
            if report:
                failed[name] = report
            else:
                results |= verdict
            write_results(results)
            print(f"{name}: {'failed' if report else 'done'}", flush=True)
    return failed


def _judge(model_type: str) -> tuple[Results, str]:
    """The verdict, or the end of what the process wrote instead."""
    command = [sys.executable, __file__, "--one", model_type]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"no verdict after {TIMEOUT_S} s"
    if done.returncode:
        return {}, done.stderr[-2000:] or f"exit status {done.returncode}"
    return {model_type: json.loads(done.stdout.splitlines()[-1])}, ""


if __name__ == "__main__":
    sys.exit(main())
