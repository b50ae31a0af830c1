"""TimedHttp: uvicorn's HTTP/1.1, with bounds for headers: how long they take, and how large."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TIMEOUT_S = 30.0
_MOST_BYTES = 1 << 16  # of a header
_REFUSAL = "HTTP/1.1 {}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class TimedHttp(HttpToolsProtocol):
    """Answers 408 and closes where a header is not whole within 30 s, or 431: it is too large.

    A connection that is kept alive, and silent, is uvicorn's `timeout_keep_alive` to end. What
    comes of a body behind its answer has 30 s as well.
    """

    _late: asyncio.TimerHandle | None = None
    _is_in_body = False
    _header_bytes = 0  # of the request that is beginning, or a little more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Let it be parsed; what begins now has so much time."""
        if self._late is None and not self._is_answering:
            self._wait()
        self._header_bytes += 0 if self._is_in_body else len(data)  # all of it, if none ends there
        super().data_received(data)
        if self._header_bytes > _MOST_BYTES:
            self._refuse("431 Request Header Fields Too Large")

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        """Wait no more."""
        self._stop_waiting()
        self._is_in_body, self._header_bytes = True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Wait no more for a body that was answered before."""
        self._stop_waiting()
        self._is_in_body = False
        super().on_message_complete()

    @property
    def _is_answering(self) -> bool:
        """Whether a request is answered, whose body has bounds of its own."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._late = self.loop.call_later(_TIMEOUT_S, self._end_late)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end_late(self) -> None:
        self._late = None
        if self._is_answering:  # the next request has begun meanwhile
            self._wait()
        else:
            self._refuse("408 Request Timeout")

    def _refuse(self, status: str) -> None:
        if self.transport.is_closing():
            return
        if not (self._is_in_body or self._is_answering):  # else it would be a second answer
            self.transport.write(_REFUSAL.format(status).encode())
        self.transport.close()
