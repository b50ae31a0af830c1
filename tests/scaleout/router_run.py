"""vllm-router in front of two servers: both answer, each adapter as the engine does."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from clients.served import PROMPT, Served, command, told
from scaleout.asking import asks_every_model, posted
from support.eventually import eventually
from support.ports import free_port, is_answered

ROUNDS = 6
MOST_S = 15.0  # until both servers know what is published: they look every 5 s


@contextmanager
def routed(served: Served) -> Iterator[str]:
    """Run the router; yield its address once it answers."""
    port, metrics = free_port(), free_port()
    words = ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    words += ["--worker-urls", served.address, *served.others, "--prometheus-port", str(metrics)]
    with subprocess.Popen([command("vllm-router"), *words]) as router:
        try:
            address = f"http://127.0.0.1:{port}"
            assert eventually(lambda: is_answered(f"{address}/health") or router.poll() is not None)
            assert router.poll() is None
            yield address
        finally:
            router.terminate()


def answered(address: str) -> float:
    """How many answers a server has given."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(r"^vllm:request_success_total{\S+} (\S+)$", text, re.M)))


def is_published(address: str, served: Served) -> None:
    """An adapter that appears in the folder of both servers is answered by both, soon."""
    name, path = next(iter(served.adapters.items()))
    folder = Path(path).parent
    shutil.copytree(path, folder / ".coming")
    (folder / ".coming").rename(folder / "new")
    start = time.monotonic()
    in_turns = 0
    while in_turns < 4:  # of two servers, each twice
        with suppress(urllib.error.HTTPError):
            body = json.loads(posted(f"{address}/v1/completions", model="new", prompt=PROMPT))
            assert body["choices"][0]["text"] == served.answers[name].completion
            in_turns += 1
            continue
        in_turns = 0
        assert time.monotonic() - start < MOST_S
    print(f"published: both servers answered after {time.monotonic() - start:.1f} s")
    shutil.rmtree(folder / "new")


if __name__ == "__main__":
    its = told()
    both = (its.address, *its.others)
    before = [answered(address) for address in both]
    with routed(its) as place:
        for _ in range(ROUNDS):
            asks_every_model(place, its)
        asked = sum(answered(address) for address in both) - sum(before)
        is_published(place, its)
    counts = [answered(address) - old for address, old in zip(both, before, strict=True)]
    print(f"answers of the servers: {counts}")
    assert len(counts) == 2
    assert asked == ROUNDS * 2 * len(its.answers)
    assert min(counts) > 0
