"""The pictures of the server's page in docs/images, of an engine that answers as its adapters do.

`PYTHONPATH=tests:src python -m support.page_pictures ENGINE FOLDER`, for an engine of the demo's
model with slots; docs/images/README.md has the whole command.
"""

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.chromium import Tab, chromium_program, chromium_tab
from support.doc_blocks import ROOT
from support.eventually import eventually
from support.page_in_browser import Page
from support.web_server import CHATS, Web, web_server

from trt_lora.runtime.server.running_server import ServerConfig

ADAPTERS = ROOT / "tests" / "adapters"
QUESTION = "Name three fruits."
SCHEMES = ("light", "dark")
LOOKS = 12  # of the page at the engine, while it is busy
WIDE, PHONE = 1280, 390


def write_pictures(engine: Path, folder: Path) -> None:
    """Write `page-VIEW-SCHEME.png` of each view in both schemes."""
    modules = [(path.name, str(path)) for path in sorted(ADAPTERS.iterdir())]
    config = ServerConfig(engine, names=["smollm2"], lora_roots=[ADAPTERS], lora_modules=modules)
    with (
        web_server(config) as web,
        tempfile.TemporaryDirectory() as profile,
        chromium_tab(chromium_program(), Path(profile)) as tab,
    ):
        page = Page(tab, web).open()
        page.choose(0, "pirate")
        ask(page)
        take(tab, folder, "chat", WIDE, 560)
        take(tab, folder, "phone", PHONE, 844)
        compare(page)
        take(tab, folder, "compare", WIDE, 600)
        with busy(web):
            before = len(page.requests("/metrics"))
            assert eventually(lambda: len(page.requests("/metrics")) > before + LOOKS)
            page.click("#pause")
            take(tab, folder, "slots", WIDE, 560, "#adapters")


def ask(page: Page) -> None:
    """Ask, and wait for the answers."""
    page.click("#clear")
    page.send(QUESTION)
    assert eventually(lambda: page.count(".question") and page.is_idle())


def compare(page: Page) -> None:
    """Let a weak pirate blended with the adapter of letters answer beside that of JSON."""
    page.click("[name=compare]")
    page.tab.evaluate("document.querySelector('input[type=range]').value = 0.8")
    page.click(".add")
    page.choose(1, "letter")
    page.tab.evaluate("document.querySelectorAll('input[type=range]')[1].value = 0.4")
    page.choose(1, "letter")
    page.choose(0, "pirate")
    page.choose(2, "json")
    ask(page)


def take(tab: Tab, folder: Path, view: str, width: int, height: int, start: str = "body") -> None:
    """Write the pictures of what is shown from an element on."""
    for scheme in SCHEMES:
        tab.show(width, scheme, height)
        tab.evaluate(
            f"document.activeElement.blur(); document.querySelector('{start}').scrollIntoView()"
        )
        (folder / f"page-{view}-{scheme}.png").write_bytes(tab.picture())


@contextmanager
def busy(web: Web) -> Iterator[None]:
    """Clients that ask all the time, more than there are rows."""
    ends = threading.Event()

    def client(model: str) -> None:
        messages = [{"role": "user", "content": f"Tell me about {model}."}]
        while not ends.is_set():
            web.post(CHATS, model=model, messages=messages, max_tokens=30, ignore_eos=True)

    models = ["smollm2", "pirate", "json", "letter", "pirate", "json"]
    threads = [threading.Thread(target=client, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]), Path(sys.argv[2]))
