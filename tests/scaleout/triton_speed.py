"""What Triton costs: the same streams from it, and from `trt-lora serve` alone."""

import http.client
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from clients.served import PROMPT, Served
from scaleout.triton_server import Triton

STREAMS, REQUESTS, TOKENS = 4, 24, 64  # at a time, of all, of each
# Letters alone, so that each token is text: of one without, the server tells nothing. It puts what
# has come meanwhile into one event; Triton's model sends each.
SAMPLING = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": list(range(40, 90))}


@dataclass(frozen=True)
class Speed:
    """What a load has seen."""

    seconds: float
    first: list[float]  # seconds to each request's first token

    @property
    def tokens(self) -> float:
        """A second."""
        return REQUESTS * TOKENS / self.seconds

    def __str__(self) -> str:
        first = sorted(1000 * each for each in self.first)
        return (
            f"{REQUESTS / self.seconds:.1f} requests/s, {self.tokens:.0f} tokens/s, first token "
            f"p50 {statistics.median(first):.1f} ms, p99 {first[-1]:.1f} ms"
        )


def first_token(address: str, path: str, body: bytes) -> float:
    """Read a stream to its end; return the seconds to its first event."""
    start, host = time.perf_counter(), address.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    with connection.getresponse() as answer:
        line = answer.readline()
        assert line.startswith(b"data: {"), line
        assert b'"error"' not in line, line
        first = time.perf_counter() - start
        assert b'"finish_reason":"length"' in line + answer.read()
    connection.close()
    return first


def speed(address: str, path: str, body: dict[str, object]) -> Speed:
    """Ask for streams, some at a time, from threads of this process."""
    given = json.dumps(body).encode()
    with ThreadPoolExecutor(STREAMS) as threads:
        list(threads.map(lambda _: first_token(address, path, given), range(STREAMS)))  # warm
        start = time.perf_counter()
        first = list(threads.map(lambda _: first_token(address, path, given), range(REQUESTS)))
        return Speed(time.perf_counter() - start, first)


def print_speed(triton: Triton, served: Served) -> None:
    """Print both, and what Triton adds to a token."""
    asked = {"text_input": PROMPT, "stream": True, "max_tokens": TOKENS, "lora_name": "a"}
    asked["sampling_parameters"] = json.dumps(SAMPLING)
    through = speed(triton.http, "/v2/models/letters/generate_stream", asked)
    body = {"model": "a", "prompt": PROMPT, "stream": True, "max_tokens": TOKENS, **SAMPLING}
    alone = speed(served.address, "/v1/completions", body)
    overhead = 1e6 * (1 / through.tokens - 1 / alone.tokens)
    print(
        f"triton: {through}\nserver: {alone}\n{through.tokens / alone.tokens:.0%} of its tokens/s"
    )
    print(f"overhead a token: {overhead:.0f} us")
