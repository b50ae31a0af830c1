"""The page as it is sent: exactly its files, which load nothing but each other."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.unopened_server import asked
from support.web_server import refused

from trt_lora.runtime.server.guard import GuardConfig
from trt_lora.runtime.server.page import page

FOLDER = Path(page.__file__).parent
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in KINDS)
PATHS = {"/" if name == "index.html" else f"/page/{name}": FOLDER / name for name in NAMES}
LARGEST = 60_000  # bytes of all files
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
LINKS = {"href", "src", "action", "formaction", "data", "srcset", "poster"}


class Tags(HTMLParser):
    """The elements of a page, with their attributes, and what scripts and styles hold."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem:  # of script and style
            self.inside.append(data)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("guard", [GuardConfig(), GuardConfig(api_keys=("one",), admin_key="two")])
def test_each_file_is_sent_as_it_is_with_or_without_a_key(path: str, guard: GuardConfig) -> None:
    response = asked(guard, "GET", path)
    assert response.status_code == 200
    assert response.content == PATHS[path].read_bytes()
    assert response.headers["content-type"] == KINDS[PATHS[path].suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-frame-options"] == "DENY"
    policy = response.headers["content-security-policy"].split("; ")
    assert dict(rule.split(" ", 1) for rule in policy) == POLICY


def test_a_browser_that_has_a_file_is_sent_it_no_second_time() -> None:
    response = asked(GuardConfig(), "GET", "/page/page.js")
    assert response.headers["cache-control"] == "no-cache"
    for etag in (response.headers["etag"], f"W/{response.headers['etag']}"):
        again = asked(GuardConfig(), "GET", "/page/page.js", {"if-none-match": etag})
        assert (again.status_code, again.content) == (304, b"")
    other = asked(GuardConfig(), "GET", "/page/page.js", {"if-none-match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/page", "/page/", "/index.html", "/page/index.html", "/page/page.py", "/page/x.js"),
        *("/page/__init__.py", "/page/../app.py", "/page/%2e%2e/app.py", "/page//page.js"),
        *("/page/page.js%00", "/page/PAGE.JS", "/page/..%2fpage%2fpage.js"),
    ],
)
def test_nothing_else_of_the_folder_is_sent(path: str) -> None:
    assert asked(GuardConfig(), "GET", path).status_code in (404, 307)


def test_the_page_is_for_who_names_this_machine_and_to_be_read_alone() -> None:
    for path in PATHS:
        refused(asked(GuardConfig(), "GET", path, {"host": "evil.example"}), 400)
        assert asked(GuardConfig(), "POST", path).status_code == 405
        assert asked(GuardConfig(), "HEAD", path).status_code == 200


def test_it_can_be_left_out() -> None:
    for path in PATHS:
        assert asked(GuardConfig(), "GET", path, shows_page=False).status_code == 404
    assert asked(GuardConfig(), "GET", "/version", shows_page=False).status_code == 200


def test_a_proxys_prefix_is_no_obstacle() -> None:
    guard = GuardConfig(root_path="/api")
    for path in PATHS:
        found = asked(guard, "GET", f"/api{path}")
        assert found.content == PATHS[path].read_bytes()
    to = asked(guard, "GET", "/api")
    assert (to.status_code, to.headers["location"]) == (307, "http://localhost/api/")


def test_the_files_are_few_and_small() -> None:
    packed = {path.name for path in FOLDER.iterdir() if path.is_file()}
    assert packed == {*NAMES, "__init__.py", "page.py"}
    assert sum(path.stat().st_size for path in PATHS.values()) < LARGEST


def test_the_html_has_no_script_or_style_of_its_own_and_asks_nobody_else() -> None:
    tags = Tags()
    tags.feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    assert "".join(tags.inside).strip() == ""
    names = {name for _, attributes in tags.found for name in attributes}
    assert [name for name in names if name.startswith("on") or name == "style"] == []
    assert "style" not in {tag for tag, _ in tags.found}
    links = [v for _, given in tags.found for name, v in given.items() if name in LINKS]
    assert {link for link in links if link and not link.startswith("#")} == {
        "page/icon.svg",
        "page/page.css",
        "page/page.js",
    }


def test_no_file_names_another_host_or_begins_a_path_at_the_root() -> None:
    for path in PATHS.values():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"\w+://|url\(|@import|[\"'`]/[a-z]{2}", text) == [], path.name


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".js")])
def test_a_script_says_its_idea_first_and_writes_no_html(name: str) -> None:
    first, second, *_ = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r"// [A-Z].{20,}\.", first)
    assert second == "// @ts-check"
    text = (FOLDER / name).read_text(encoding="utf-8")
    for word in (
        "HTML =",
        "HTML(",
        "eval",
        "document.write",
        "localStorage",
        "cookie",
        "Function(",
    ):
        assert word not in text
