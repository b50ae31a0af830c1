"""DrainingServer: uvicorn with an end that loses no answer, and one that says why."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
from dataclasses import dataclass
from types import FrameType

import uvicorn

from trt_lora.plugins.checked import check_range
from trt_lora.plugins.errors import StateError
from trt_lora.runtime.server.app import Server
from trt_lora.runtime.server.http_protocol import TimedHttp
from trt_lora.runtime.server.log_lines import LogConfig

_LOG = logging.getLogger(__name__)
_LAST_WORDS_S = 2.0  # for error events to leave
_LOOK_S = 0.05  # between two looks at what is under way
_GRACEFUL_S = 3  # for responses to leave, once everything has ended
_OPEN_FILES = 1 << 16  # connections among them: a shell's own limit is 1,024
_NOT_STARTED = 3  # exit status: the address is taken, say; as uvicorn's
DEAD_ENGINE = 70  # exit status: the engine's process is gone (EX_SOFTWARE)


@dataclass(frozen=True)
class WebConfig:
    """Where a server listens, and how it ends."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None  # path of a Unix socket, instead of host and port
    root_path: str = ""  # that a proxy in front strips
    uvicorn_log_level: str = "warning"
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None  # HTTPS instead of HTTP
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # as in the module `ssl`
    drain_grace_s: float = 5.0  # after SIGTERM, in which requests are still taken
    shutdown_timeout_s: float = 30.0  # that answers then have to end

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning.

        Raises:
            ConfigError: there is one.
        """
        check_range("--port", self.port, 0, 65_535)
        check_range("--drain-grace", self.drain_grace_s, 0)
        check_range("--shutdown-timeout", self.shutdown_timeout_s, 0)

    @property
    def address(self) -> str:
        """Where it listens, as a client calls it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "https" if self.ssl_certfile else "http"
        return self.uds or f"{scheme}://{host}:{self.port}{self.root_path}"


def serve(server: Server, web: WebConfig, log: LogConfig) -> int:
    """Serve until a signal ends it, with the process's log set up; return the exit status.

    Raises:
        LoRAError: as `started`.
    """
    config = uvicorn.Config(
        server.app,
        host=web.host,
        port=web.port,
        uds=web.uds,
        http=TimedHttp,
        log_level=web.uvicorn_log_level,
        log_config=None,  # that is its own
        access_log=False,
        timeout_graceful_shutdown=_GRACEFUL_S,
        ssl_keyfile=web.ssl_keyfile,
        ssl_certfile=web.ssl_certfile,
        ssl_ca_certs=web.ssl_ca_certs,
        ssl_cert_reqs=web.ssl_cert_reqs,
    )
    log.set_up()
    _allow_open_files()
    draining = DrainingServer(config, server, web)
    draining.run()
    return draining.exit_status if draining.started or draining.force_exit else _NOT_STARTED


def _allow_open_files() -> None:
    """Let as many files be open as may be: beyond them no connection is accepted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class DrainingServer(uvicorn.Server):
    """Follows SIGTERM: not ready at once, requests for a while, then none, and what runs ends.

    Ctrl-C leaves the while out. A second signal ends at once.
    """

    def __init__(self, config: uvicorn.Config, server: Server, web: WebConfig) -> None:
        """Take the application."""
        super().__init__(config)
        self._server, self._web = server, web
        self._start: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.exit_status = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, tell a supervisor, and watch the engine."""
        self._event_loop = asyncio.get_running_loop()
        self._start = asyncio.create_task(self._server.start())
        await asyncio.wait({self._start})
        if self._start.cancelled():  # by a signal
            return
        self._start.result()  # here its errors are the caller's, and no traceback in a log
        await super().startup(sockets)
        if self.started:
            gc.collect()
            gc.freeze()  # a collection looks through what requests leave, not through all modules
            self._watch = asyncio.create_task(self._end_with_engine())
            notify("READY=1")
            _LOG.info("listens at %s", self._web.address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what is open, where the end is forced too: uvicorn leaves the lifespan out."""
        await super().shutdown(sockets)
        if self.force_exit:
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS_S)
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Follow a signal."""
        del frame
        if self._event_loop is None or not self.started or self._server.is_draining:
            self.should_exit = self.force_exit = True
            if self._event_loop is not None:
                self._event_loop.call_soon_threadsafe(self._end_now)
            return
        self._server.is_draining = True
        grace = 0.0 if sig == signal.SIGINT else self._web.drain_grace_s
        self._event_loop.call_soon_threadsafe(self._begin_drain, grace)

    def _end_now(self) -> None:
        if self._server.running is not None:
            self._server.running.kill()
        elif self._start is not None:
            self._start.cancel()

    def _begin_drain(self, grace_s: float) -> None:
        notify("STOPPING=1")
        self._drain = asyncio.create_task(self._drained(grace_s))

    async def _drained(self, grace_s: float) -> None:
        running = self._server.running
        assert running is not None
        await asyncio.sleep(grace_s)
        running.admission.refuses = True
        deadline = asyncio.get_running_loop().time() + self._web.shutdown_timeout_s
        while running.admission.requests and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_LOOK_S)
        running.client.fail_all(StateError("this server ends; ask another one"))
        self.should_exit = True

    async def _end_with_engine(self) -> None:
        running = self._server.running
        assert running is not None
        await asyncio.wait({running.client.dead})
        if not self.should_exit:
            self.exit_status = DEAD_ENGINE
            await asyncio.sleep(_LAST_WORDS_S)
            self.should_exit = True


def notify(state: str) -> None:
    """Tell systemd what a service is about, where it asks; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(state.encode(), address.replace("@", "\0", 1))
