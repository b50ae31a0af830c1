"""Build an engine; print time and peak memory of every stage as JSON.

Run by cpu.py in a process of its own: peak memory is what the process holds above what its
imports already do.
"""

import importlib
import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.scripts.measuring.process_memory import proportional_bytes

SAMPLE_SECONDS = 0.1  # a reading takes milliseconds, in which nothing else runs
_IMPORTS = ("trt_lora.builder.write_engine", "onnxscript")  # of a build, before it is measured


@dataclass
class Stage:
    """Time and memory of one stage."""

    stage: str
    seconds: float = 0.0
    peak_bytes: int = 0


class Meter:
    """Progress that measures instead of drawing."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._base, self._start = proportional_bytes(), time.perf_counter()
        threading.Thread(target=self._sample, daemon=True).start()

    def stage(self, name: str) -> None:
        """Close the last stage and open another."""
        self.close()
        self.stages.append(Stage(name))

    def close(self) -> None:
        """End the last stage."""
        now = time.perf_counter()
        if self.stages:
            self.stages[-1].seconds = now - self._start
        self._start = now

    def advance(self, done: int, total: int) -> None:
        """Steps are not measured."""

    def note(self, message: str) -> None:
        """Notes are not measured."""

    def _sample(self) -> None:
        while True:
            if self.stages:
                last = self.stages[-1]
                last.peak_bytes = max(last.peak_bytes, proportional_bytes() - self._base)
            time.sleep(SAMPLE_SECONDS)


def main() -> None:
    """Build MODEL into OUTPUT for the modules named after them, in float32."""
    model, output, *modules = sys.argv[1:]
    for name in _IMPORTS:
        importlib.import_module(name)
    meter = Meter()
    build_engine(BuildConfig(Path(model), Path(output), tuple(modules), dtype="float32"), meter)
    meter.close()
    print(json.dumps([asdict(stage) for stage in meter.stages]))


if __name__ == "__main__":
    main()
