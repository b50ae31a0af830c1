"""Churn: adapters come, change and go under requests that end, are cancelled or dropped.

    PYTHONPATH=tests:src python -m support.load.churn ENGINE --seconds 3600

ENGINE takes several adapters and has a tokenizer. Every answer must be that of an adapter which its
name meant while the request was under way, as an engine gives it that answers nothing else.
"""

import argparse
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from support.adapter_routes import KNOWN, LOAD, UNLOAD
from support.load.inside import Inside, inside
from support.load.said import ASKED, Said, said_alone, said_over_http
from support.served_engines import Spoken, write_adapter
from support.web_server import COMPLETIONS, web_server

from trt_lora.runtime import Engine, open_engine
from trt_lora.runtime.manifest import read_manifest
from trt_lora.runtime.server.admission import AdmissionConfig

NAMES, VARIANTS = ("x0", "x1", "x2", "x3"), 5  # names; adapters that they may mean
CHANGING, ASKING = 2, 4  # threads
WORK = (*["load"] * 8, "unload", "pin", "unpin", "unpin")
PARTS = (  # of what is asked for: an adapter, one at a strength, blends
    *(({name: 1.0}, name) for name in NAMES),
    *(({name: 0.5}, None) for name in NAMES[:2]),
    ({"x0": 0.75, "x1": 0.5}, None),
    ({"x1": 1.0, "x2": -0.5}, None),
)
PROMPTS = [[*range(5, 20), *range(30, 30 + tail)] for tail in (2, 5, 9)]  # they begin alike
# What a request may be told whose adapter is unloaded or replaced: it is not there, or it was in
# the middle of an answer when its slot was taken, or its blend was being made.
ALLOWED = {404, 503}


def is_allowed(response: httpx.Response) -> bool:
    """Whether an answer is such a refusal; a part of a blend that is not there is 400."""
    if response.status_code == 400:
        return bool(response.json()["error"]["param"] == "lora")
    return response.status_code in ALLOWED


@dataclass
class Meanings:
    """What a name has meant, and when: the newest last."""

    lock: threading.Lock = field(default_factory=threading.Lock)  # of who changes it
    began: list[tuple[float, int | None]] = field(default_factory=lambda: [(0.0, None)])
    ended: list[float] = field(default_factory=list)  # when the one before was certainly gone

    @contextmanager
    def change(self, to: int | None) -> Iterator[None]:
        """From the request on it may mean another adapter, and from the answer on it does."""
        self.began.append((time.monotonic(), to))
        yield
        self.ended.append(time.monotonic())

    def between(self, start: float, end: float) -> list[int | None]:
        """What it may have meant between two moments, one after another."""
        began = list(self.began)
        ended = [*self.ended[: len(began) - 1], *[float("inf")] * len(began)]
        pairs = zip(began, ended, strict=False)
        return [what for (since, what), until in pairs if since <= end and until >= start]


class Churn:
    """The threads, and what they have seen."""

    def __init__(self, client_of: Callable[[], httpx.Client], paths: list[Path], alone: Engine):
        """Take what makes clients of a server, the variants, and an engine that knows them all."""
        self._client_of, self._paths, self._alone = client_of, paths, alone
        self._meanings = {name: Meanings() for name in NAMES}
        self._known: dict[Any, Said] = {}
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self.counts, self.errors = Counter[str](), list[BaseException]()

    def run(self, seconds: float, seed: int = 0) -> None:
        """Change and ask for so many seconds; raise the first error."""
        works = [self._change] * CHANGING + [self._ask] * ASKING
        threads = [
            threading.Thread(target=self._repeat, args=(work, seed + number))
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        self._is_over.wait(seconds)
        self._is_over.set()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def unload_all(self) -> None:
        """Leave nothing."""
        with self._client_of() as client:
            for name in NAMES:
                client.post(UNLOAD, json={"lora_name": name, "wait": True})

    def _repeat(self, work: Callable[[httpx.Client, random.Random], None], seed: int) -> None:
        try:
            with self._client_of() as client:
                rng = random.Random(seed)
                while not self._is_over.is_set():
                    work(client, rng)
        except BaseException as error:
            self.errors.append(error)
            self._is_over.set()

    def _change(self, client: httpx.Client, rng: random.Random) -> None:
        name, what = rng.choice(NAMES), rng.choice(WORK)
        meanings, number = self._meanings[name], rng.randrange(VARIANTS)
        with meanings.lock:
            is_there = meanings.began[-1][1] is not None
            if what == "load":
                body = {"lora_name": name, "lora_path": str(self._paths[number])}
                with meanings.change(number):
                    response = client.post(LOAD, json={**body, "load_inplace": True})
                if response.status_code == 409:  # its pin finds no slot: it is what it was
                    self._take_back(meanings)
            elif what == "unload":
                with meanings.change(None):
                    asked = {"lora_name": name, "wait": rng.random() < 0.5}
                    response = client.post(UNLOAD, json=asked)
            else:
                response = client.post(f"{KNOWN}/{name}/{what}")
        self.counts[f"{what} {response.status_code}"] += 1
        allowed = {200, 409} if what in ("pin", "load") else {200}
        assert response.status_code in (allowed if is_there or what == "load" else {404}), (
            what,
            response.text,
        )

    def _take_back(self, meanings: Meanings) -> None:
        """Nothing has changed, though it might have for a moment: both are possible until now."""
        with meanings.change(meanings.began[-2][1]):
            pass

    def _ask(self, client: httpx.Client, rng: random.Random) -> None:
        (parts, model), prompt = rng.choice(PARTS), rng.choice(range(len(PROMPTS)))
        body = {"prompt": PROMPTS[prompt], "return_token_ids": True, **ASKED}
        body |= {"model": model} if model else {"lora": _wanted(parts)}
        start = time.monotonic()
        if rng.random() < 0.2:
            return self._drop(client, {**body, "stream": rng.random() < 0.7})
        response = client.post(COMPLETIONS, json=body)
        meant = [self._meanings[name].between(start, time.monotonic()) for name in parts]
        self.counts[f"answer {response.status_code}"] += 1
        if is_allowed(response):
            assert any(len(each) > 1 or None in each for each in meant), (meant, response.text)
            return None
        assert response.status_code == 200, response.text
        wholes = {each for each in product(*meant) if None not in each}
        expected = [self._expected(each, [*parts.values()], prompt) for each in wholes]
        said = said_over_http(response.json())
        assert said.is_one_of(expected), (parts, meant, said, expected)
        self.counts["checked"] += 1
        return None

    def _drop(self, client: httpx.Client, body: dict[str, Any]) -> None:
        """Close the connection after the first piece, or before any."""
        self.counts["dropped"] += 1
        try:
            with client.stream("POST", COMPLETIONS, json=body, timeout=0.01) as response:
                next(response.iter_raw(), None)
        except httpx.TimeoutException:
            pass

    def _expected(self, numbers: tuple[Any, ...], weights: list[float], prompt: int) -> Said:
        """What these variants answer with these weights."""
        with self._lock:
            key = numbers, tuple(weights), prompt
            if key not in self._known:
                self._known[key] = self._said(numbers, weights, prompt)
            return self._known[key]

    def _said(self, numbers: tuple[Any, ...], weights: list[float], prompt: int) -> Said:
        parts: dict[str, float] = {}
        for number, weight in zip(numbers, weights, strict=True):
            parts[f"v{number}"] = parts.get(f"v{number}", 0.0) + weight  # two names may mean one
        return said_alone(self._alone, PROMPTS[prompt], parts)


def _wanted(parts: dict[str, float]) -> list[dict[str, Any]]:
    return [{"name": name, "scale": scale} for name, scale in parts.items()]


def churn(engine: Path, folder: Path, seconds: float, seed: int = 0) -> Counter[str]:
    """Serve an engine for so many seconds of churn; return what happened how often.

    Raises:
        AssertionError: an answer was wrong, or a request was refused that had no reason to be.
        StateError: requests, rows, leases, slots or bytes do not add up at the end.
    """
    manifest = read_manifest(engine)
    rank = manifest.max_lora_rank
    ranks = [max(rank // (2 + number % 3), 1) for number in range(VARIANTS)]
    paths = [
        write_adapter(folder / f"v{number}", manifest, rank=ranks[number], seed=number)
        for number in range(VARIANTS)
    ]
    config = Spoken(engine, {}).config(
        lora_roots=[folder], admission=AdmissionConfig(max_num_queued_reqs=1000)
    )
    with inside() as opened, web_server(config) as web, open_engine(engine) as alone:
        for path in paths:
            alone.adapters.load(path.name, path)
        url = web.client.base_url
        work = Churn(lambda: httpx.Client(base_url=url, timeout=60), paths, alone)
        work.run(seconds, seed)
        work.unload_all()
        _check_end(opened)
    return work.counts


def _check_end(opened: Inside) -> None:
    opened.check_integrity()
    stats = opened.adapters.stats
    assert (stats.memory_bytes, stats.in_slots, stats.pinned, stats.registered) == (0, 0, 0, 0)


def main() -> None:
    """Churn for as long as is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        for what, count in sorted(churn(args.engine, Path(scratch), args.seconds).items()):
            print(f"{what}: {count}")


if __name__ == "__main__":
    main()
