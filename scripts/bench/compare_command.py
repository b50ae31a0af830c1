"""Time `trt-lora compare`; print seconds and peak memory of its process tree as JSON.

    python -m trt_lora.scripts.bench.compare_command ENGINE [NAME=PATH ...]

Run by cpu.py. Memory is what lies in RAM, summed over the processes that run at one time (Linux);
what they share, such as libraries, is counted in each.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from trt_lora.scripts.measuring.process_memory import resident_bytes

_INTERVAL = 0.05  # seconds between two looks


def measure(engine: Path, adapters: list[str]) -> dict[str, float]:
    """Run the command as a user would, and look at its processes until it ends."""
    options = [word for adapter in adapters for word in ("--adapter", adapter)]
    with tempfile.TemporaryDirectory() as scratch:
        module = [sys.executable, "-m", "trt_lora.scripts.trt_lora_command", "compare"]
        command = [*module, str(engine), *options, "--keep", f"{scratch}/kept"]
        start, peak = time.perf_counter(), 0
        with subprocess.Popen(command, stdout=sys.stderr) as process:
            while process.poll() is None:
                peak = max(peak, sum(map(resident_bytes, _tree(process.pid))))
                time.sleep(_INTERVAL)
        seconds = time.perf_counter() - start
    if process.returncode:
        sys.exit(process.returncode)
    return {"seconds": seconds, "peak": peak}


def _tree(root: int) -> Iterator[int]:
    """A process and all that it started; any may end at any time."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, _, rest = path.read_text().rpartition(")")  # behind the program's name
            children.setdefault(int(rest.split()[1]), []).append(int(path.parent.name))
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        yield pid


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2:])))
