"""TimedHttp: uvicorn's HTTP/1.1, with an end for connections that send no whole header."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TIMEOUT_S = 30.0
_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class TimedHttp(HttpToolsProtocol):
    """Answers 408 and closes where the first header is not whole within 30 s.

    Later requests of a connection that is kept alive are uvicorn's `timeout_keep_alive` to end.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self._late = self.loop.call_later(_TIMEOUT_S, self._end_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().on_headers_complete()

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_LATE)
            self.transport.close()
