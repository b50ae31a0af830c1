"""Ask a server over HTTP with what every Python has."""

import json
import urllib.error
import urllib.request

from clients.served import FEW, MESSAGES, PROMPT, Served


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
