"""Streams of completions from several threads, and how long they took."""

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from clients.served import PROMPT


@dataclass(frozen=True)
class Streamed:
    """One answer: its tokens, and when each came, in seconds since it was asked for."""

    tokens: list[int]
    times: list[float]
    end: str  # its finish reason; or what went wrong


@dataclass(frozen=True)
class Load:
    """Many answers."""

    answers: list[Streamed]
    seconds: float

    def row(self, name: str, share: str) -> str:
        """Return a line of the table: how fast it was."""
        tokens = sum(len(answer.tokens) for answer in self.answers)
        firsts = sorted(1000 * answer.times[0] for answer in self.answers)
        p99 = firsts[int(0.99 * (len(firsts) - 1))]
        return (
            f"| {name} | {len(self.answers) / self.seconds:.1f} | {tokens / self.seconds:.0f} "
            f"| {firsts[len(firsts) // 2]:.0f} / {p99:.0f} | {1000 * self.seconds / tokens:.2f} "
            f"| {share} |"
        )


HEADER = (
    "| | requests/s | tokens/s | first token ms p50 / p99 | ms a token | adapter met in a slot |\n"
    "|---|---|---|---|---|---|"
)


def loaded(address: str, models: Sequence[str], most: int, *, threads: int) -> Load:
    """Ask each model in turn for so many tokens, so many at a time."""
    start = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(lambda model: streamed(address, model, most), models))
    return Load(answers, time.monotonic() - start)


def streamed(address: str, model: str, most: int) -> Streamed:
    """Return one greedy answer that ends at its length alone."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": most, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "logprobs": 0, "return_tokens_as_token_ids": True}
    place, start = urlsplit(address), time.monotonic()
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=120)
    found = Streamed([], [], "")
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            return Streamed([], [], f"{response.status}: {response.read().decode()}")
        for line in response:
            found = _with(found, line.decode().strip(), time.monotonic() - start)
    except (OSError, http.client.HTTPException) as error:
        return Streamed(found.tokens, found.times, repr(error))
    finally:
        connection.close()
    return found


def _with(found: Streamed, line: str, seconds: float) -> Streamed:
    if not line.startswith("data: {"):
        return found
    event = json.loads(line.removeprefix("data: "))
    if "choices" not in event:
        return Streamed(found.tokens, found.times, line)
    for choice in event["choices"]:
        names = (choice.get("logprobs") or {}).get("tokens") or []
        found.tokens.extend(int(name.removeprefix("token_id:")) for name in names)
        found.times.extend([seconds] * len(names))
        found = Streamed(found.tokens, found.times, choice.get("finish_reason") or found.end)
    return found
