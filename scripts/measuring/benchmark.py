"""Schema of a benchmark: what was measured of an engine, as `bench --export` writes it."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_lora.plugins.checked import typed
from trt_lora.plugins.errors import ConfigError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.files.json_file import read_json

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class VariantTimes:
    """What one variant took for one workload; ratios are to the base model, round by round."""

    contestant: str  # as the file calls a variant
    rank: int  # 0: the base model
    first_token_ms: float  # median of the rounds
    first_token_ratio: float
    token_p50_ms: float  # of one step, which gives every row a token
    token_p90_ms: float
    token_p99_ms: float
    token_ratio: float  # of the time of a token: above 1 it is slower than the base model
    tokens_per_second: float  # of all rows, after the first token
    # The least and the most of the rounds' ratios; 0 in files of earlier releases.
    first_token_ratio_min: float = 0.0
    first_token_ratio_max: float = 0.0
    token_ratio_min: float = 0.0
    token_ratio_max: float = 0.0


@dataclass(frozen=True)
class WorkloadTimes:
    """One workload, and all variants, the base model first."""

    rows: int
    prompt_tokens: int
    new_tokens: int
    rounds: int
    contestants: tuple[VariantTimes, ...]


@dataclass(frozen=True)
class Benchmark:
    """A run of `trt-lora bench`."""

    engine: str  # the name of the base model
    backend: str  # what ran it: ONNX Runtime or TensorRT
    machine: Mapping[str, str]
    memory_bytes: Mapping[str, int]  # by what it is of
    workloads: tuple[WorkloadTimes, ...]
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """Return the text of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def read_benchmark(path: Path) -> Benchmark:
    """Read what `to_json` wrote.

    Raises:
        AdapterError: the file cannot be read, or holds no object.
        ConfigError: it is no benchmark, or one of another release.
    """
    data = read_json(path)
    with made_by("trt-lora bench --export", path):
        return _parse(data)


@contextmanager
def made_by(command: str, path: Path) -> Iterator[None]:
    """Refuse a file whose contents the block cannot take, and name the command that writes such.

    Raises:
        ConfigError: an item is missing, or of another type.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error!s:.500}"
        raise ConfigError(
            f"{path} is not what `{command}` writes: {what}; run it again, and pass its output"
        ) from error


def _parse(data: dict[str, Any]) -> Benchmark:
    if data["schema_version"] != SCHEMA_VERSION:
        version = shown(data["schema_version"])
        raise ValueError(f"schema version is {version}, this release reads {SCHEMA_VERSION}")
    found: Benchmark = typed(Benchmark, data, "benchmark")
    return found
