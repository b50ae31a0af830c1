"""A stress: adapters that another process rewrites all the time are loaded whole, or refused.

python tests/hostile/stress_rewrites.py FOLDER    # the other process
"""

import contextlib
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime.adapters.load import load_adapter

TENSORS, WIDTH, RANK = 16, 256, 8
VERSIONS = {1: (1, 3), 2: (2, 4)}  # what every value of folder 1 may be, and of folder 2
LINK, WEIGHTS, STARTED = "adapter", "adapter_model.safetensors", "started"
PIECE = 100_000  # bytes
PAUSES = (0, 0, 0.001, 0.03, 0.1)  # seconds: a tick of the clock of files is at most 0.01


def run(seconds: float) -> int:
    """Return how many adapters were loaded whole; raise AssertionError for one that was not."""
    count = 0
    with rewritten() as adapter:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(AdapterError):
                assert_whole(adapter)
                count += 1
    return count


def assert_whole(adapter: Path) -> None:
    """Load an adapter; all weights must be of one version, and the scale of the same folder."""
    loaded = load_adapter(adapter)
    scales = {weight.scale for weight in loaded.weights.values() if weight.scale != 1} or {1.0}
    # Piece by piece, as a cast does.
    found = {float(x) for w in loaded.weights.values() for x in np.unique(w.read())}
    assert len(found) == 1, f"mixed: {found}"
    assert found <= {float(value) for scale in scales for value in VERSIONS[int(scale)]}, (
        f"the config of {scales}, weights of {found}"
    )


@contextmanager
def rewritten() -> Iterator[Path]:
    """Yield a PEFT directory that a process changes in every way there is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for version, values in VERSIONS.items():
            (folder / str(version)).mkdir()
            config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * version}
            (folder / str(version) / "adapter_config.json").write_text(json.dumps(config))
            (folder / str(version) / WEIGHTS).write_bytes(weights(values[0]))
        (folder / LINK).symlink_to("1")
        writer = subprocess.Popen([sys.executable, __file__, name])
        try:
            while not (folder / STARTED).exists():
                assert writer.poll() is None
                time.sleep(0.01)
            yield folder / LINK
            assert writer.poll() is None
        finally:
            writer.kill()
            writer.wait()


def weights(value: int) -> bytes:
    """The weights of an adapter, all of one value."""
    shapes = {"A": (RANK, WIDTH), "B": (WIDTH, RANK)}
    return save(
        {
            f"base_model.model.layers.{i}.q_proj.lora_{factor}.weight": np.full(
                shape, value, np.float32
            )
            for i in range(TENSORS)
            for factor, shape in shapes.items()
        }
    )


# --------------------------------------------------------------------------------------- the writer


def whole(file: Path, data: bytes, pause: float) -> None:
    """In one piece."""
    with file.open("r+b", buffering=0) as stream:
        stream.write(data)


def in_pieces(file: Path, data: bytes, pause: float) -> None:
    """With pauses."""
    with file.open("r+b", buffering=0) as stream:
        for start in range(0, len(data), PIECE):
            stream.write(data[start : start + PIECE])
            time.sleep(pause)


def cut_first(file: Path, data: bytes, pause: float) -> None:
    """As most programs do."""
    with file.open("wb", buffering=0) as stream:
        time.sleep(pause)
        stream.write(data)


def through_memory(file: Path, data: bytes, pause: float) -> None:
    """Without a call that the system would see."""
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as memory:
        for start in range(0, len(data), PIECE):
            memory[start : start + PIECE] = data[start : start + PIECE]
            time.sleep(pause)


def dated_back(file: Path, data: bytes, pause: float) -> None:
    """With the time that it had."""
    before = file.stat()
    whole(file, data, pause)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(file: Path, data: bytes, pause: float) -> None:
    """By another file in its place."""
    file.with_suffix(".new").write_bytes(data)
    file.with_suffix(".new").replace(file)


WAYS: tuple[Callable[[Path, bytes, float], None], ...] = (
    whole,
    in_pieces,
    cut_first,
    through_memory,
    dated_back,
    replaced,
)


def rewrite(folder: Path) -> None:
    """Write another version into a folder, or let the link lead to the other folder; for ever."""
    chance = random.Random(0)
    data = {value: weights(value) for values in VERSIONS.values() for value in values}
    (folder / STARTED).touch()
    while True:
        version = chance.choice(list(VERSIONS))
        if chance.random() < 0.3:
            (folder / "new").symlink_to(str(version))
            (folder / "new").replace(folder / LINK)
        else:
            write, value = chance.choice(WAYS), chance.choice(VERSIONS[version])
            write(folder / str(version) / WEIGHTS, data[value], chance.choice(PAUSES))
        time.sleep(chance.choice(PAUSES))


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]))
