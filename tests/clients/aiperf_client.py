"""aiperf: streams of three adapters in turn; what it measures is what the server's metrics say."""

import json
import math
import re
import subprocess
import urllib.request
from pathlib import Path

from clients.served import Served, command, told

REQUESTS, TOKENS = 36, 24
CLOSE = 0.1  # part by which two clocks of the same thing may differ


def measured(served: Served) -> dict[str, float]:
    """The sums and counts of the server's histograms, by their names."""
    with urllib.request.urlopen(f"{served.address}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r"^vllm:(\w+_seconds_(?:sum|count)){\S+} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def profile(served: Served) -> dict[str, dict[str, float]]:
    """Run it, and return what it has measured, by name."""
    words = ["--model", ",".join(served.adapters), "--model-selection-strategy", "round_robin"]
    words += ["--endpoint-type", "chat", "--streaming", "--url", served.address]
    words += ["--tokenizer", served.engine, "--concurrency", "3", "--random-seed", "1"]
    words += ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "32"]
    words += ["--output-tokens-mean", str(TOKENS), "--extra-inputs", "ignore_eos:true"]
    words += ["--extra-inputs", "temperature:0", "--ui-type", "none", "--artifact-dir", "out"]
    words += ["--no-gpu-telemetry", "--no-server-metrics", "--use-server-token-count"]
    subprocess.run([command("aiperf"), "profile", *words], check=True)
    (file,) = Path("out").rglob("profile_export_aiperf.json")
    found: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    its = told()
    before = measured(its)
    theirs = profile(its)
    ours = {name: value - before.get(name, 0) for name, value in measured(its).items()}
    assert theirs["request_count"]["avg"] == REQUESTS
    assert theirs["output_sequence_length"]["avg"] == TOKENS
    assert ours["time_to_first_token_seconds_count"] == REQUESTS
    assert ours["inter_token_latency_seconds_count"] == REQUESTS * (TOKENS - 1)
    for name, metric in (
        ("time_to_first_token", "time_to_first_token_seconds"),
        ("inter_token_latency", "inter_token_latency_seconds"),
        ("request_latency", "e2e_request_latency_seconds"),
    ):
        milliseconds = 1000 * ours[f"{metric}_sum"] / ours[f"{metric}_count"]
        print(f"{name:20} {theirs[name]['avg']:8.1f} ms by aiperf, {milliseconds:8.1f} by /metrics")
        assert math.isclose(milliseconds, theirs[name]["avg"], rel_tol=CLOSE), name
