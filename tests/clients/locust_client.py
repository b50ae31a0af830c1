"""locust: eight users ask every model in turn, and look at what they get."""

# pyright: reportMissingImports=false
import csv
import itertools
import subprocess
from pathlib import Path

from clients.served import FEW, MESSAGES, PROMPT, command, told
from locust import HttpUser, constant, task

SERVED = told()
TURNS = itertools.cycle(SERVED.answers.items())


class User(HttpUser):
    """One who asks without a pause."""

    host, wait_time = SERVED.address, constant(0)

    @task
    def chats(self) -> None:
        """A chat, whose text is the engine's."""
        name, expected = next(TURNS)
        body = {"model": name, "messages": MESSAGES, **FEW}
        self._posts("/v1/chat/completions", body, expected.chat, "message", "content")

    @task
    def completes(self) -> None:
        """A completion, whose text is the engine's."""
        name, expected = next(TURNS)
        body = {"model": name, "prompt": PROMPT, **FEW}
        self._posts("/v1/completions", body, expected.completion, "text")

    def _posts(self, path: str, body: object, expected: str, *places: str) -> None:
        with self.client.post(path, json=body, catch_response=True) as response:
            found = response.json()["choices"][0]
            for place in places:
                found = found[place]
            if found != expected:
                response.failure(f"answered {found!r}")


if __name__ == "__main__":
    words = ["--headless", "--users", "8", "--spawn-rate", "8", "--run-time", "5s"]
    words += ["--csv", "locust", "--only-summary", "--exit-code-on-error", "1"]
    subprocess.run([command("locust"), "--locustfile", __file__, *words], check=True)
    with Path("locust_stats.csv").open(encoding="utf-8") as file:
        *_, total = csv.DictReader(file)
    assert int(total["Failure Count"]) == 0
    assert int(total["Request Count"]) > 50
    print(f"{total['Requests/s']} requests/s, p95 {total['95%']} ms")
