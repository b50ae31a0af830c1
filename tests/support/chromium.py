"""Headless Chromium, spoken to by the DevTools protocol through pipes: no port, no library.

A message is JSON and ends with a zero byte; Chromium reads descriptor 3 and writes descriptor 4.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe"),
)

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

SECONDS = 60  # after which a browser that says nothing is given up


@dataclass
class Tab:
    """One page of a browser."""

    to: int  # descriptors
    from_: int
    session: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)  # in the order they came
    _number: int = 0
    _unread: bytes = b""

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Return the result of a method; what happens meanwhile is kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        session = {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(message | session).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path | str) -> None:
        """Show a file or an address until all of it is there; forget what happened before."""
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        while not self.happened("Page.loadEventFired"):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript or of its promise; None if undefined."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def happened(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events of one kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def show(self, width: int, scheme: str, height: int = 900) -> None:
        """Set the width of the window in pixels, and `dark` or `light`."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def press(self, key: str, text: str = "", *, modifiers: int = 0) -> None:
        """Press and release a key by its name, as `KeyboardEvent.key`; 8 is Shift."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowDown": 40}
        pressed = {"key": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def write(self, text: str) -> None:
        """Write into what has the focus."""
        self.call("Input.insertText", text=text)

    def picture(self) -> bytes:
        """Return what is shown, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self.from_], [], [], SECONDS)[0], "Chromium hangs"
            data = os.read(self.from_, 1 << 20)
            assert data, "Chromium ended"
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


def chromium_program() -> str:
    """Return the program's path; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(PROGRAMS)} is installed; on Debian: apt install chromium")
    return found


@contextmanager
def chromium_tab(program: str, profile: Path) -> Iterator[Tab]:
    """Start Chromium and yield an empty tab that tells of requests and errors.

    Args:
        program: Chromium's.
        profile: a folder for what it writes.
    """
    with _pipe() as (commands, to), _pipe() as (from_, answers):
        places = [(os.POSIX_SPAWN_DUP2, commands, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]
        silent = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_WRONLY, 0) for n in (1, 2)]
        argv = [program, *OPTIONS, f"--user-data-dir={profile}"]
        process = os.posix_spawn(program, argv, os.environ, file_actions=[*places, *silent])
        try:
            yield _attached(Tab(to, from_))
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Descriptors above those that Chromium expects, so that moving one overwrites no other."""
    low = os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            os.close(end)


def _attached(tab: Tab) -> Tab:
    target = tab.call("Target.createTarget", url="about:blank")["targetId"]
    tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Network", "Runtime", "Log"):
        tab.call(f"{domain}.enable")
    return tab
