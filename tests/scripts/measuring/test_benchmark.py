"""The file of a benchmark: what is written is read again, anything else is refused."""

import json
from pathlib import Path

import pytest
from support.benchmarks import BENCHMARK

from trt_lora.plugins.errors import AdapterError, ConfigError
from trt_lora.scripts.measuring.benchmark import read_benchmark


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(BENCHMARK.to_json())
    assert read_benchmark(path) == BENCHMARK


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version is 2, this release reads 1"),
        ({"engine": 3}, "benchmark.engine is 3, expected str"),
        ({"workloads": [{}]}, "rows is missing"),
        ({"workloads": 3}, "benchmark.workloads is 3, expected a list"),
        ({"memory_bytes": {"a": "b"}}, "expected int"),
        ({"more": 1}, "'more' is not known to this release"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(json.loads(BENCHMARK.to_json()) | change))
    with pytest.raises(ConfigError, match="is not what `trt-lora bench --export` writes") as raised:
        read_benchmark(path)
    assert message in str(raised.value)


def test_what_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(AdapterError, match="holds a list, not an object"):
        read_benchmark(tmp_path / "list.json")
