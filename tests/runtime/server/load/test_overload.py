"""More than a server can take: refused, silent and deaf clients cost it nothing that stays."""

import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import TinyEngine
from support.eventually import eventually
from support.load.memory import most_growth, resident
from support.served_engines import Spoken
from support.served_process import started
from support.spoken_engine import spoken_engine
from support.web_server import COMPLETIONS, posted, web_server

from trt_lora.runtime.server.running_server import ServerConfig

SILENT, SOFT = 10_000, 256  # connections; the soft limit of open files that a server starts with
REFUSED, WARM, AT_ONCE = 10_000, 1_000, 100  # requests; before memory is measured; on their way
MOST_GROWTH = 0.01
DEAF, WORD = 16, 2_000  # answers that are not read; characters of a word


def request(**fields: object) -> bytes:
    return posted(COMPLETIONS, json.dumps({"prompt": [1, 2, 3], "temperature": 0, **fields}))


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    """Another soft limit of open files, which processes that are started inherit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
def test_ten_thousand_connections_that_send_nothing_keep_nobody_from_an_answer(
    spoken: Spoken,
) -> None:
    """The server opens as many files as it may, not as many as its shell has said."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = min(SILENT, hard - 1_000)
    with ExitStack() as stack:
        with open_files(SOFT):
            server = stack.enter_context(started(spoken.engine))
            assert eventually(server.is_ready)
        stack.enter_context(open_files(hard))
        files = Path(f"/proc/{server.process.pid}/fd")
        before = len(list(files.iterdir()))
        address = (server.client.base_url.host, server.client.base_url.port)
        silent = [socket.create_connection(address) for _ in range(count)]
        assert eventually(lambda: len(list(files.iterdir())) >= before + count)
        body = {"prompt": [5], "max_tokens": 1}
        assert server.client.post(COMPLETIONS, json=body).status_code == 200
        for each in silent:
            each.close()
        assert eventually(lambda: len(list(files.iterdir())) < before + count // 10)
        assert server.client.post(COMPLETIONS, json=body).status_code == 200


@pytest.mark.slow
def test_memory_under_ten_thousand_refused_requests_is_flat(spoken: Spoken) -> None:
    options = ("--max-num-queued-reqs", "0", "--max-num-seqs", "1")
    with started(spoken.engine, *options) as server, ExitStack() as stack:
        assert eventually(server.is_ready)
        processes = [server.process.pid, server.engine]
        address = (server.client.base_url.host, server.client.base_url.port)
        os.kill(server.engine, signal.SIGSTOP)
        stack.callback(os.kill, server.engine, signal.SIGCONT)
        holder, refused = (stack.enter_context(socket.create_connection(address)) for _ in "12")
        holder.sendall(request())  # it has the only row as long as the engine stands
        assert eventually(lambda: server.client.get("/load").json()["server_load"] == 1)
        before = list[int]()
        for done in range(0, REFUSED + WARM, AT_ONCE):
            if done == WARM:
                before = resident(processes)
            refused.sendall(request() * AT_ONCE)
            found = b""
            while found.count(b"HTTP/1.1 503") < AT_ONCE or not found.endswith(b"}}"):
                data = refused.recv(1 << 20)
                assert data
                found += data
        assert most_growth(before, resident(processes)) < MOST_GROWTH


def test_a_client_that_never_reads_holds_up_neither_the_engine_nor_others(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    engine = spoken_engine(tiny_engine.slots, tmp_path / "engine", word_length=WORD)
    config = ServerConfig(engine, in_process=True, names=["base"])
    with web_server(config) as web, socket.socket() as deaf, ThreadPoolExecutor() as pool:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        deaf.connect(web.address)
        deaf.sendall(request(stream=True, n=DEAF, temperature=1, max_tokens=60, logprobs=20))
        assert eventually(lambda: web.load == DEAF)
        others = [
            pool.submit(web.answer, COMPLETIONS, prompt=[7, number], max_tokens=4)
            for number in range(4)
        ]
        assert all(other.result()["choices"] for other in others)
        assert eventually(lambda: web.running.client.running == 0)  # the engine has said all
        assert web.load == DEAF  # and it was not read
        deaf.close()
        assert eventually(lambda: web.load == 0)
        assert len(web.running.client) == 0
