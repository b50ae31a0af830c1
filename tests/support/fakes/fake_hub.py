"""A Hugging Face hub on this machine: repositories are folders, and one commit is all they have."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass
class FakeHub:
    """Its repositories are the folders org/repo of a folder."""

    folder: Path
    is_up: bool = True
    asked: list[str] = field(default_factory=list)  # paths of requests
    address: str = ""

    def files(self, repo: str) -> dict[str, Path]:
        """The files of a repository, by their paths in it."""
        home = self.folder / repo
        return {str(p.relative_to(home)): p for p in sorted(home.rglob("*")) if p.is_file()}

    def commit(self, repo: str) -> str:
        """The one commit: other files make another one."""
        digest = sha256()
        for name, path in self.files(repo).items():
            digest.update(name.encode() + path.read_bytes())
        return digest.hexdigest()[:40]


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    """Serve repositories."""
    hub = FakeHub(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.asked.append(path)
            words = path.strip("/").split("/")
            if not hub.is_up:
                self._send(b"{}", 500)
            elif words[:2] == ["api", "models"]:
                self._of_repo("/".join(words[2:4]), words[4:])
            else:  # org/repo/resolve/commit/file
                self._file("/".join(words[:2]), "/".join(words[4:]))

        def _file(self, repo: str, name: str) -> None:
            found = hub.files(repo).get(name)
            if found is None:
                return self._send(b"{}", 404)
            content = found.read_bytes()
            tag = f'"{sha256(content).hexdigest()}"'
            self._send(content, 200, {"X-Repo-Commit": hub.commit(repo), "ETag": tag})

        def _of_repo(self, repo: str, rest: list[str]) -> None:
            files = hub.files(repo)
            if not files:
                return self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
            if rest[:1] == ["tree"]:
                entries = [
                    {
                        "type": "file",
                        "path": name,
                        "size": path.stat().st_size,
                        "oid": sha256(path.read_bytes()).hexdigest()[:40],
                    }
                    for name, path in files.items()
                ]
                return self._send(json.dumps(entries).encode())
            siblings = [{"rfilename": name} for name in files]
            known: dict[str, Any] = {"id": repo, "sha": hub.commit(repo), "siblings": siblings}
            self._send(json.dumps(known).encode())

        def _send(
            self, content: bytes, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def log_message(self, format: str, *words: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, name="hub")
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
