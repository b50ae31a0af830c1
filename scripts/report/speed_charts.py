"""Charts of times: of a benchmark's contestants, and of other ways to run an adapter."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trt_lora.plugins.checked import typed
from trt_lora.runtime.files.json_file import read_json
from trt_lora.scripts.measuring.benchmark import Benchmark, WorkloadTimes
from trt_lora.scripts.measuring.made_by import made_by
from trt_lora.scripts.report.bars import Bar, Chart

_OURS = "ours"


def benchmark_charts(benchmark: Benchmark) -> tuple[Chart, ...]:
    """Return charts of tokens/s, the time of a token and the first token, for each workload."""
    return tuple(chart for times in benchmark.workloads for chart in _workload_charts(times))


def _workload_charts(times: WorkloadTimes) -> Iterator[Chart]:
    asked = f"{times.rows} x {times.prompt_tokens} + {times.new_tokens} tokens"
    yield Chart(
        f"Tokens/s, {asked}",
        tuple(
            Bar(c.contestant, c.tokens_per_second, f"{c.tokens_per_second:.1f}")
            for c in times.contestants
        ),
    )
    yield Chart(
        f"Time of a token, {asked}",
        tuple(
            Bar(
                c.contestant,
                c.token_p50_ms,
                f"{c.token_p50_ms:.2f} ms, p99 {c.token_p99_ms:.2f} ({c.token_ratio:.2f} x base)",
            )
            for c in times.contestants
        ),
    )
    yield Chart(
        f"First token, {asked}",
        tuple(
            Bar(
                c.contestant,
                c.first_token_ms,
                f"{c.first_token_ms:.0f} ms ({c.first_token_ratio:.2f} x base)",
            )
            for c in times.contestants
        ),
    )


@dataclass(frozen=True)
class PeerTimes:
    """What one peer took for one workload."""

    title: str
    tokens_per_second: float
    prompt_ms: float
    is_ours: bool


@dataclass(frozen=True)
class PeerCell:
    """One workload of `docs/benchmarks/peers.json`."""

    rows: int
    prompt_tokens: int
    peers: tuple[PeerTimes, ...]


def peer_charts(path: Path) -> tuple[Chart, ...]:
    """Return charts of decode and prompt of every workload that `scripts.bench.peers` measured.

    Raises:
        AdapterError: the file cannot be read, or holds no object.
        ConfigError: it is not what the benchmark writes.
    """
    data = read_json(path)
    with made_by("python -m trt_lora.scripts.bench.peers", path):
        cells = tuple(_peer_cell(cell, data["peers"]) for cell in data["cells"])
    return tuple(chart for cell in cells if cell.peers for chart in _peer_charts(cell))


def _peer_cell(cell: Mapping[str, Any], peers: Mapping[str, Any]) -> PeerCell:
    times = [
        {
            "title": peers[name]["title"],
            "tokens_per_second": row["decode, tokens/s"],
            "prompt_ms": row["prompt, ms"],
            "is_ours": name == _OURS,
        }
        for name, row in cell["peers"].items()
    ]
    fields = {"rows": cell["batch"], "prompt_tokens": cell["context"], "peers": times}
    found: PeerCell = typed(PeerCell, fields, "cell")
    return found


def _peer_charts(cell: PeerCell) -> Iterator[Chart]:
    asked = f"{cell.rows} x {cell.prompt_tokens} tokens"
    yield Chart(
        f"Decode, tokens/s, {asked}",
        tuple(
            Bar(p.title, p.tokens_per_second, f"{p.tokens_per_second:.1f}", p.is_ours)
            for p in cell.peers
        ),
    )
    yield Chart(
        f"Prompt, ms, {asked}",
        tuple(Bar(p.title, p.prompt_ms, f"{p.prompt_ms:.0f}", p.is_ours) for p in cell.peers),
    )
