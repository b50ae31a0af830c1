"""vllm-router in front of two servers: both answer, each adapter as the engine does."""

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from clients.served import FEW, MESSAGES, PROMPT, Served, command, told
from support.eventually import eventually
from support.ports import free_port, is_answered

ROUNDS = 6


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


def posted(url: str, **body: object) -> str:
    """Return what is answered to JSON."""
    given = json.dumps(body | FEW).encode()
    asked = urllib.request.Request(url, given, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        return str(answer.read().decode())


def streamed(url: str, **body: object) -> str:
    """Return the text of a chat's stream, which ends as it should."""
    *events, done = posted(url, stream=True, **body).strip().split("\n\n")
    assert done == "data: [DONE]"
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in found)


def answered(address: str) -> float:
    """How many answers a server has given."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read().decode()
    return sum(map(float, re.findall(r"^vllm:request_success_total{\S+} (\S+)$", text, re.M)))


def asks_every_model(address: str, served: Served) -> None:
    """Completions and streams of chats; and the refusal of a name that neither server knows."""
    for model, expected in served.answers.items():
        body = json.loads(posted(f"{address}/v1/completions", model=model, prompt=PROMPT))
        assert body["choices"][0]["text"] == expected.completion
        text = streamed(f"{address}/v1/chat/completions", model=model, messages=MESSAGES)
        assert text == expected.chat
    try:
        posted(f"{address}/v1/completions", model="nobody", prompt=PROMPT)
    except urllib.error.HTTPError as error:
        assert error.code == 404
        assert json.load(error)["error"]["param"] == "model"
    else:
        raise AssertionError("an unknown model was answered")


if __name__ == "__main__":
    its = told()
    both = (its.address, *its.others)
    before = [answered(address) for address in both]
    with routed(its) as place:
        for _ in range(ROUNDS):
            asks_every_model(place, its)
    counts = [answered(address) - old for address, old in zip(both, before, strict=True)]
    print(f"answers of the servers: {counts}")
    assert len(counts) == 2
    assert sum(counts) == ROUNDS * 2 * len(its.answers)
    assert min(counts) > 0
