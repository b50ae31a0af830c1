"""`trt-lora serve` beside `Scheduler`: tokens/s and first tokens in turns, and the web's own cost.

The client and `Scheduler` are this process, the web is another one, its engine a third; they have
the machine's cores together.
"""

import asyncio
import gc
import json
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trt_lora.builder import BuildConfig
from trt_lora.plugins.errors import BackendError
from trt_lora.runtime import Engine, open_engine
from trt_lora.scripts.demo.__main__ import ADAPTERS, MODEL, ensure_engine
from trt_lora.scripts.demo.model import ensure_demo_model
from trt_lora.scripts.measuring.answer_times import AnswerTimes, answer_times
from trt_lora.scripts.measuring.child import ChildProcess
from trt_lora.scripts.measuring.report import ResultRow
from trt_lora.scripts.measuring.turns import Times, alternate
from trt_lora.scripts.measuring.worker import WrongResultError
from trt_lora.scripts.terminal.build_progress import build_progress

ENGINE = Path("engines/many")  # as docs/many-adapters.md builds it
STREAMS, TOKENS, ROUNDS = 8, 96, 6
FEW = 4  # tokens: an engine that is idle again does other work at once
FIRST_TOKENS = 40  # of each side, after one of each row
STEPS_MS = {32: 4.3, 8: 20.6}  # of the stub by streams: as on a GPU, and as on this CPU
STUB_TOKENS, STUB_ROUNDS = 200, 8  # of each stream

ALONE, STREAMED, WHOLE, SAMPLED = "Scheduler", "streamed", "not streamed", "at temperature 1"
WAYS: dict[str, dict[str, Any]] = {
    STREAMED: {"stream": True, "stream_options": {"include_usage": True}},
    WHOLE: {},
    SAMPLED: {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 1,
        "seed": 0,
    },
}
_HEAD = (
    "POST {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {}\r\n"
    "Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{}"
)
USAGE = re.compile(rb'"completion_tokens":(\d+)')


def request(body: Mapping[str, Any], key: str = "a", path: str = "/v1/completions") -> bytes:
    """Return a request of HTTP of the client with a key, which does not matter to the server."""
    text = json.dumps(body)
    return _HEAD.format(path, key, len(text), text).encode()


@dataclass(frozen=True)
class WebProcess:
    """A server on its way, in processes of its own."""

    port: int
    pid: int  # of the web's

    async def ask(self, body: Mapping[str, Any]) -> tuple[float, int]:
        """Return the seconds to the first token of a stream, and how many it had at last.

        Raises:
            WrongResultError: it is refused.
        """
        answer, first = bytearray(), 0.0
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        start = time.perf_counter()
        writer.write(request(body))
        while data := await reader.read(1 << 16):
            answer += data
            if not first and b"data: " in answer:
                first = time.perf_counter() - start
        writer.close()
        if not (found := USAGE.search(answer)):
            raise WrongResultError(f"the server says {bytes(answer[:300])!r}")
        return first, int(found[1])

    async def rate(self, bodies: Sequence[Mapping[str, Any]]) -> float:
        """Return tokens/s of requests that come together."""
        start = time.perf_counter()
        answers = await asyncio.gather(*map(self.ask, bodies))
        return sum(tokens for _, tokens in answers) / (time.perf_counter() - start)

    @property
    def processor_time(self) -> float:
        """Seconds that all threads of the web's process have had; see clock_getcpuclockid(3)."""
        return time.clock_gettime(~self.pid << 3 | 2)


@contextmanager
def web(*words: object) -> Iterator[WebProcess]:
    """Run `python -m WORDS` as a server while the context lasts.

    Raises:
        BackendError: it does not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *words, "--served-model-name", "base", "--port", port]
    with (
        TemporaryDirectory() as scratch,
        ChildProcess(command, Path(scratch, "log"), sys.path) as child,
    ):
        try:
            _wait(child, port)
        except EOFError as error:
            raise BackendError("\n".join(child.last_lines(20))) from error
        yield WebProcess(port, child.pid)


def _wait(child: ChildProcess, port: int) -> None:
    """Wait until a server listens, which it does when its engine has made a step."""
    while True:
        with suppress(OSError):
            return socket.create_connection(("127.0.0.1", port)).close()
        with suppress(TimeoutError):
            child.receive(0.1)


class Sides:
    """`Scheduler` and a server over one engine's files, asked alike; no prompt repeats."""

    def __init__(self, engine: Engine, server: WebProcess, adapters: Sequence[str]) -> None:
        """Take both, and the adapters that requests take in turn."""
        self._scheduler, self._tokenizer = engine.serve(), engine.tokenizer
        self._server, self._adapters = server, adapters
        self._numbers = count()

    def rate(self, way: str) -> float:
        """Return tokens/s of full rows, asked in one of `WAYS` or of `Scheduler`."""
        prompts = [self._prompt() for _ in range(STREAMS)]
        names = [self._adapters[row % len(self._adapters)] for row in range(STREAMS)]
        if way == ALONE:
            times = self._alone(prompts, names, TOKENS)
            return STREAMS * TOKENS / (times.first_token + times.decode)
        asked = zip(prompts, names, strict=True)
        bodies = [body_of(prompt, name, TOKENS) | WAYS[way] for prompt, name in asked]
        return asyncio.run(self._server.rate(bodies))

    def first_token_ms(self, way: str) -> float:
        """Return milliseconds to the first token of one request, the second of two alone.

        Before the first one, the other side's engine has emptied the processor's caches.
        """
        return [self._first_token_ms(way) for _ in range(2)][1]

    def _first_token_ms(self, way: str) -> float:
        prompt, name = self._prompt(), self._adapters[0]
        if way == ALONE:
            return self._alone([prompt], [name], FEW).first_token * 1e3
        return asyncio.run(self._server.ask(body_of(prompt, name, FEW) | WAYS[way]))[0] * 1e3

    def _alone(self, prompts: Sequence[str], names: Sequence[str], tokens: int) -> AnswerTimes:
        ids = [self._tokenizer.encode_text(text, special_tokens=True) for text in prompts]
        return answer_times(self._scheduler, ids, names, tokens)

    def _prompt(self) -> str:
        return f"{next(self._numbers)} people ask for a fruit:"


def body_of(prompt: str | Sequence[int], model: str, tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {"model": model, "prompt": prompt, **sampling}


def rows() -> Iterator[ResultRow]:
    """Measure a server with a real engine, which is built if need be, and with one that rests."""
    engine = built()
    yield from beside_scheduler(engine)
    for streams, step_ms in STEPS_MS.items():
        yield web_part(engine, streams, step_ms)


def built() -> Path:
    """Return the demo's model with a slot for each of its adapters; it is built once."""
    adapters = tuple(sorted(ADAPTERS.iterdir()))
    options: dict[str, Any] = {"dtype": "float32", "flavour": "none", "max_loras": len(adapters)}
    config = BuildConfig(ensure_demo_model(MODEL), ENGINE, lora_dirs=adapters, **options)
    with build_progress() as progress:
        ensure_engine(config, progress)
    return ENGINE


def beside_scheduler(directory: Path) -> Iterator[ResultRow]:
    """Ask a server and `Scheduler` in turns."""
    paths = {path.name: path for path in sorted(ADAPTERS.iterdir())}
    modules = [f"{name}={path}" for name, path in paths.items()]
    words = ("trt_lora", "serve", directory, "--backend", "onnxruntime", "--lora-modules", *modules)
    with web(*words) as server, open_engine(directory, "onnxruntime") as engine:
        for name, path in paths.items():
            engine.adapters.load(name, path)
        gc.collect()
        gc.freeze()  # as the server's processes do
        sides = Sides(engine, server, list(paths))
        first = _alternate([ALONE, STREAMED], sides.first_token_ms, FIRST_TOKENS, STREAMS)
        later = [b - a for a, b in zip(first.samples[ALONE], first.samples[STREAMED], strict=True)]
        yield ResultRow(
            "first token of an idle server",
            {"rounds": FIRST_TOKENS},
            {f"{name}, ms": first.median(name) for name in first.samples}
            | {"streamed less Scheduler, ms": statistics.median(later)},
            {f"{STREAMED} / {ALONE}": first.ratio(STREAMED, ALONE)},
        )
        rates = _alternate([ALONE, *WAYS], sides.rate, ROUNDS, 1)
        yield ResultRow(
            "full rows",
            {"streams": STREAMS, "adapters": len(paths), "tokens": TOKENS, "rounds": ROUNDS},
            {f"{name}, tokens/s": rates.median(name) for name in rates.samples},
            {
                f"{way} / {base}": rates.ratio(way, base)
                for way, base in ((STREAMED, ALONE), (WHOLE, ALONE), (SAMPLED, STREAMED))
            },
        )


def web_part(directory: Path, streams: int, step_ms: float) -> ResultRow:
    """Measure the web's processor time where the engine computes nothing."""
    words = ("trt_lora.scripts.bench.stub_server", streams, step_ms, "serve", directory)
    bodies = [body_of("Name a fruit.", "base", STUB_TOKENS) | WAYS[STREAMED]] * streams
    used, rates = [], []
    with web(*words) as server:
        for _ in range(STUB_ROUNDS + 1):
            before = server.processor_time
            rates.append(asyncio.run(server.rate(bodies)))
            used.append((server.processor_time - before) / streams / STUB_TOKENS * 1e6)
    return ResultRow(
        f"the web's part of {streams} streams",
        {"step of the stub, ms": step_ms, "tokens": STUB_TOKENS, "rounds": STUB_ROUNDS},
        {
            "processor time of a token, us": statistics.median(used[1:]),
            "least of a round": min(used[1:]),
            "most of a round": max(used[1:]),
            "tokens/s": statistics.median(rates[1:]),
        },
    )


def _alternate(
    ways: Sequence[str], measure: Callable[[str], float], rounds: int, warm_up: int
) -> Times:
    return alternate(ways, lambda order: list(map(measure, order)), rounds, warm_up=warm_up)
