"""DrainingServer: uvicorn with an end that loses no answer, and one that says why."""

import asyncio
import os
import signal
import socket
from types import FrameType

import uvicorn

from trt_lora.plugins.errors import StateError
from trt_lora.runtime.server.app import Server

_LAST_WORDS_S = 2.0  # for error events to leave
_LOOK_S = 0.05  # between two looks at what is under way
DEAD_ENGINE = 70  # exit status: the engine's process is gone (EX_SOFTWARE)


class DrainingServer(uvicorn.Server):
    """Follows SIGTERM: not ready at once, requests for a while, then none, and what runs ends.

    Ctrl-C leaves the while out. A second signal ends at once.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server: Server,
        *,
        drain_grace_s: float,
        shutdown_timeout_s: float,
    ) -> None:
        """Take the application.

        Args:
            config: of uvicorn.
            server: whose `app` it runs.
            drain_grace_s: seconds after SIGTERM in which requests are still taken.
            shutdown_timeout_s: seconds that answers then have to end.
        """
        super().__init__(config)
        self._server, self._grace_s, self._timeout_s = server, drain_grace_s, shutdown_timeout_s
        self._drain: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self.exit_status = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, tell a supervisor, and watch the engine."""
        self._event_loop = asyncio.get_running_loop()
        await self._server.start()  # here its errors are the caller's, and no traceback in a log
        await super().startup(sockets)
        if self.started:
            self._watch = asyncio.create_task(self._end_with_engine())
            notify("READY=1")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Follow a signal."""
        del frame
        if self._event_loop is None or not self.started or self._server.is_draining:
            self.should_exit = self.force_exit = True
            return
        self._server.is_draining = True
        grace = 0.0 if sig == signal.SIGINT else self._grace_s
        self._event_loop.call_soon_threadsafe(self._begin_drain, grace)

    def _begin_drain(self, grace_s: float) -> None:
        notify("STOPPING=1")
        self._drain = asyncio.create_task(self._drained(grace_s))

    async def _drained(self, grace_s: float) -> None:
        running = self._server.running
        assert running is not None
        await asyncio.sleep(grace_s)
        running.admission.refuses = True
        deadline = asyncio.get_running_loop().time() + self._timeout_s
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
