"""Charts of times: of a benchmark's variants, and of other ways to run an adapter."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trt_lora.plugins.checked import typed
from trt_lora.runtime.files.json_file import read_json
from trt_lora.scripts.measuring.benchmark import Benchmark, WorkloadTimes, made_by
from trt_lora.scripts.report.bars import Bar, Chart

_OURS = "ours"


def benchmark_charts(benchmark: Benchmark) -> tuple[Chart, ...]:
    """Return charts of tokens/s, the time of a token and the first token, for each workload."""
    return tuple(chart for times in benchmark.workloads for chart in _workload_charts(times))


def _workload_charts(times: WorkloadTimes) -> Iterator[Chart]:
    asked = f"{times.rows} x {times.prompt_tokens} + {times.new_tokens} tokens"
    rates, tokens, firsts = [], [], []
    for c in times.contestants:
        of_token = f"p99 {c.token_p99_ms:.2f} ({c.token_ratio:.2f} x base)"
        of_first = f"{c.first_token_ms:.0f} ms ({c.first_token_ratio:.2f} x base)"
        rates.append(Bar(c.contestant, c.tokens_per_second, f"{c.tokens_per_second:.1f}"))
        tokens.append(Bar(c.contestant, c.token_p50_ms, f"{c.token_p50_ms:.2f} ms, {of_token}"))
        firsts.append(Bar(c.contestant, c.first_token_ms, of_first))
    yield Chart(f"Tokens/s, {asked}", tuple(rates))
    yield Chart(f"Time of a token, {asked}", tuple(tokens))
    yield Chart(f"First token, {asked}", tuple(firsts))


def peer_charts(path: Path) -> tuple[Chart, ...]:
    """Return charts of decode and prompt of every workload that `scripts.bench.peers` measured.

    Raises:
        AdapterError: the file cannot be read, or holds no object.
        ConfigError: it is not what the benchmark writes.
    """
    data = read_json(path)
    with made_by("python -m trt_lora.scripts.bench.peers", path):
        charts = [chart for cell in data["cells"] for chart in _peer_charts(cell, data["peers"])]
    return tuple(charts)


def _peer_charts(cell: Mapping[str, Any], peers: Mapping[str, Any]) -> Iterator[Chart]:
    asked = f"{cell['batch']} x {cell['context']} tokens"
    for what, title, digits in (
        ("decode, tokens/s", "Decode, tokens/s", 1),
        ("prompt, ms", "Prompt, ms", 0),
    ):
        bars = tuple(
            _bar(name, peers[name]["title"], row[what], digits)
            for name, row in cell["peers"].items()
        )
        if bars:
            yield Chart(f"{title}, {asked}", bars)


def _bar(name: str, title: object, value: Any, digits: int) -> Bar:
    typed(str, title, "title")
    return Bar(str(title), typed(float, value, "time"), f"{value:.{digits}f}", name == _OURS)
