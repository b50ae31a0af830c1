"""The server's page in Chromium, and what one does with it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support.chromium import Tab
from support.eventually import eventually
from support.web_server import Web

# What it takes to be reached by the Tab key.
REACHABLE = "a[href], button, input, select, textarea, summary, [tabindex='0']"


@dataclass(frozen=True)
class Page:
    """The page of one server in a tab."""

    tab: Tab
    web: Web

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self.web.address
        return f"http://{host}:{port}/"

    def open(self) -> "Page":
        """Open it as a new visitor, at temperature 0, when it knows the models."""
        self.tab.open(self.url)
        if self.tab.evaluate("sessionStorage.length"):
            self.tab.evaluate("sessionStorage.clear()")
            self.tab.open(self.url)
        assert eventually(lambda: self.text("#rows-text") or self.text("#trouble"))
        self.tab.evaluate("document.querySelector('[name=temperature]').value = 0")
        return self

    def text(self, selector: str, place: int = 0) -> str:
        """What an element says; nothing where there is none."""
        found: str = self.tab.evaluate(f"{_all(selector)}[{place}]?.textContent ?? ''")
        return found

    def texts(self, selector: str) -> list[str]:
        """What all such elements say."""
        found: list[str] = self.tab.evaluate(f"{_all(selector)}.map(e => e.textContent)")
        return found

    def count(self, selector: str) -> int:
        """How many such elements there are that are shown."""
        found: int = self.tab.evaluate(f"{_all(selector)}.filter(e => e.checkVisibility()).length")
        return found

    def click(self, selector: str, place: int = 0) -> None:
        """Click one."""
        self.tab.evaluate(f"{_all(selector)}[{place}].click()")

    def focus(self, selector: str, place: int = 0) -> None:
        """Let it have the focus."""
        self.tab.evaluate(f"{_all(selector)}[{place}].focus()")

    def choose(self, place: int, name: str) -> None:
        """Choose a model in one of the lists."""
        value = json.dumps(name)
        self.tab.evaluate(
            f"(e => {{ e.value = {value}; e.dispatchEvent(new Event('change')) }})"
            f"({_all('select')}[{place}])"
        )
        assert self.tab.evaluate(f"{_all('select')}[{place}].value") == name

    def fill(self, selector: str, text: str) -> None:
        """Write into a field."""
        self.focus(selector)
        self.tab.evaluate("document.activeElement.select()")
        self.tab.write(text)

    def send(self, prompt: str) -> None:
        """Write a prompt, and press Enter."""
        self.fill("#prompt", prompt)
        self.tab.press("Enter", "\r")

    def shows(self, condition: Callable[[], object]) -> bool:
        """Whether a condition comes true, of this page."""
        return eventually(condition)

    def is_idle(self) -> bool:
        """Whether no answer is under way."""
        return bool(self.tab.evaluate("document.querySelector('#stop').disabled"))

    def bodies(self, path: str) -> list[dict[str, Any]]:
        """The bodies that were sent to a route since the page was opened."""
        return [json.loads(request["postData"]) for request in self.requests(path)]

    def requests(self, path: str = "") -> list[dict[str, Any]]:
        """The requests to a route since the page was opened; without one, all."""
        self.tab.evaluate("0")  # until now
        sent = [event["request"] for event in self.tab.happened("Network.requestWillBeSent")]
        return [r for r in sent if not path or r["url"] == f"{self.url.rstrip('/')}{path}"]

    def complaints(self) -> list[str]:
        """What the browser's console says, but for statuses that the page asks for."""
        entries = [event["entry"] for event in self.tab.happened("Log.entryAdded")]
        said = [
            entry["text"]
            for entry in entries
            if entry["level"] != "verbose" and entry.get("source") != "network"
        ]
        failed = self.tab.happened("Runtime.exceptionThrown")
        called = self.tab.happened("Runtime.consoleAPICalled")
        return [*said, *map(str, [*failed, *called])]


def _all(selector: str) -> str:
    return f"[...document.querySelectorAll({json.dumps(selector)})]"
